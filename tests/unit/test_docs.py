"""The guide as a site: it builds strictly, links lead somewhere, public names are on the reference page.

That its blocks run is `tests/multidevice/test_guide.py`'s to show.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import dtrain
import guide
from dtrain import cli
from dtrain.cli.config_file import with_config

PAGES_OUTSIDE = (
    "README.md",
    "CHANGELOG.md",
    "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
)
TEXTS = [
    *guide.pages(),
    *(guide.ROOT / name for name in PAGES_OUTSIDE),
]
IDS = [str(path.relative_to(guide.ROOT)) for path in TEXTS]
# Tests have no network: what pages link to outside was looked at when it was put here.
OUTSIDE = {
    "https://arxiv.org/abs/1404.5997",
    "https://arxiv.org/abs/1603.04467",
    "https://arxiv.org/abs/1605.09774",
    "https://arxiv.org/abs/1706.02677",
    "https://arxiv.org/abs/1805.09767",
    "https://arxiv.org/abs/1910.02054",
    "https://github.com/kubernetes-sigs/jobset",
    "https://github.com/horovod/horovod/issues/4290",
    "https://github.com/keras-team/keras/issues/18624",
    "https://github.com/keras-team/keras/issues/20585",
    "https://github.com/ray-project/ray/issues/47464",
    "https://semver.org",
    "https://www.cs.toronto.edu/~kriz/cifar.html",
    "https://www.tensorflow.org/guide/distributed_training",
}
PACKAGES = ("checkpoint", "data", "monitor", "optim", "ray")
LINK = re.compile(r"\]\(([^()\s]+)\)")
# A name on the reference page, with its arguments where it is shown with some.
NAME = re.compile(r"`(dtrain(?:\.\w+)+)(?:\(([^`]*)\))?`")


def prose(path: Path) -> str:
    """A page without its code."""
    text = re.sub(r"^```.*?^```[^\n]*$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(path: Path) -> set[str]:
    """What can be linked to in a page: its headings, as GitHub and MkDocs both spell them."""
    text = re.sub(r"^```.*?^```[^\n]*$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def build(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """As `make docs` builds it. Not with --quiet, under which MkDocs forgets that warnings are errors."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=folder,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        timeout=120,
        capture_output=True,
        text=True,
    )


def test_the_files_that_the_architecture_names_exist() -> None:
    """By their names or the ends of their paths; `NAME.py` stands for a file that one adds."""
    folders = ("src/dtrain", "tests", "benchmarks")
    files = [
        f"/{path.relative_to(guide.ROOT)}" for each in folders for path in guide.ROOT.glob(f"{each}/**/*.py")
    ]
    named = set(
        re.findall(r"[\w./]+\.py\b", (guide.ROOT / "docs/architecture.md").read_text(encoding="utf-8"))
    )
    named = {each.lstrip("./") for each in named}  # also where a link has the whole path
    missing = {name for name in named if not any(file.endswith(f"/{name}") for file in files)}
    assert missing <= {"NAME.py"}


def test_the_site_builds_strictly_and_asks_no_other_host_for_anything(tmp_path: Path) -> None:
    site = tmp_path / "site"
    done = build(guide.ROOT, site)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "WARNING" not in done.stderr
    pages = {path.stem for path in site.glob("*.html")} - {"404"}
    assert pages == {path.stem for path in guide.pages()}
    for html in site.rglob("*.html"):
        text = html.read_text(encoding="utf-8")
        assert not re.findall(r"<(?:script|img|iframe)[^>]*src=\"?https?:", text), html
        assert not re.findall(r"<link[^>]*href=\"?https?:", text), html
    assert (site / "repository" / "examples" / "custom_loop.py").is_file()


def test_a_dead_link_fails_the_build(tmp_path: Path) -> None:
    """So that the test above can be believed."""
    settings = yaml.safe_load((guide.ROOT / "mkdocs.yml").read_text())
    settings["nav"] = [{"Home": "index.md"}]
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(settings))
    shutil.copytree(guide.DOCS / "hooks", tmp_path / "docs" / "hooks")
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md"):  # which the hook brings in
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("# A page\n")
    (tmp_path / "there.py").write_text("")
    dead = ("nowhere.md", "../nowhere.py", "index.md#none", "../CONTRIBUTING.md#nor-here")
    links = " ".join(f"[link]({target})" for target in ("../there.py", "../CONTRIBUTING.md#a-page", *dead))
    (tmp_path / "docs" / "index.md").write_text(f"# Home\n\n{links}\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == len(dead), done.stderr
    for found in ("nowhere.md", "nowhere.py", "#none", "#nor-here"):
        assert sum(found in line for line in warnings) == 1, done.stderr


def test_every_page_is_in_the_navigation() -> None:
    text = (guide.ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = re.findall(r"^ +- [^:\n]+: (\S+\.md)$", text, flags=re.M)
    assert len(named) == len(set(named))
    assert {name for name in named if "/" not in name} == {path.name for path in guide.pages()}


@pytest.mark.parametrize("path", TEXTS, ids=IDS)
def test_every_link_leads_somewhere(path: Path) -> None:
    for target in LINK.findall(prose(path)):
        if "://" in target:
            assert target in OUTSIDE, f"{target} is not in the list of links that were looked at"
            continue
        name, _, anchor = target.partition("#")
        found = (path.parent / name).resolve() if name else path
        assert found.exists(), f"{path.name}: {target}"
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found), f"{path.name}: {target}"


def test_links_that_were_looked_at_are_sound_and_used() -> None:
    used = {target for path in TEXTS for target in LINK.findall(prose(path)) if "://" in target}
    assert used == OUTSIDE
    assert all(re.fullmatch(r"https://[\w.-]+(/[\w./~-]*)?", target) for target in OUTSIDE)


@pytest.mark.parametrize("path", TEXTS, ids=IDS)
def test_every_dtrain_command_of_a_page_can_be_given(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = path.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for block in guide.blocks(text):
        if block.language == "toml" and block.title:
            (tmp_path / block.title).write_text(block.text)  # a file of `--config`
    for command in guide.commands(text):
        arguments = guide.dtrain_arguments(command)
        if arguments is None:
            continue
        assert arguments[0] in cli.COMMANDS, command
        module = importlib.import_module(cli.COMMANDS[arguments[0]])
        parser = argparse.ArgumentParser(
            prog=f"dtrain {arguments[0]}", allow_abbrev=False, exit_on_error=False
        )
        module.add_arguments(parser)
        try:
            parser.parse_args(with_config(parser, arguments[1:]))
        except (SystemExit, argparse.ArgumentError) as error:
            pytest.fail(f"{path.name}: {' '.join(command)}: {error}")


def test_commands_are_found() -> None:
    found = [command for path in TEXTS for command in guide.commands(path.read_text(encoding="utf-8"))]
    assert len([command for command in found if "launch" in command]) >= 5
    assert len([command for command in found if "train" in command]) >= 10


def test_every_public_name_is_on_the_reference_page() -> None:
    shown = {name for name, _ in NAME.findall((guide.DOCS / "reference.md").read_text(encoding="utf-8"))}
    public = {f"dtrain.{name}" for name in dtrain.__all__}
    for package in PACKAGES:
        module = importlib.import_module(f"dtrain.{package}")
        public |= {f"dtrain.{package}.{name}" for name in module.__all__}
    errors = importlib.import_module("dtrain.errors")
    public |= {
        f"dtrain.errors.{name}"
        for name, each in inspect.getmembers(errors, inspect.isclass)
        if each.__module__ == "dtrain.errors" and name != "DtrainError"
    }
    assert not public - shown, "not on the reference page"


def test_what_the_reference_page_shows_is_there() -> None:
    for name, arguments in NAME.findall((guide.DOCS / "reference.md").read_text(encoding="utf-8")):
        found = dtrain
        for part in name.split(".")[1:]:
            try:
                found = getattr(found, part)
            except AttributeError:
                found = importlib.import_module(f"{found.__name__}.{part}")
        given = [each.strip().lstrip("*") for each in arguments.split(",") if each.strip() not in ("", "*")]
        if given:
            parameters = [*inspect.signature(found).parameters]
            assert [each for each in parameters if each in given] == given, f"{name} takes {parameters}"
