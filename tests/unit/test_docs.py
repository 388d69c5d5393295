"""The guide as a site: it builds strictly, links lead somewhere, public names and errors are on a page.

That its blocks run is `tests/multidevice/test_guide.py`'s to show.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import guide
import public_names
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
    "https://arxiv.org/abs/1506.01186",
    "https://arxiv.org/abs/1603.04467",
    "https://arxiv.org/abs/1605.09774",
    "https://arxiv.org/abs/1704.05021",
    "https://arxiv.org/abs/1706.02677",
    "https://arxiv.org/abs/1805.09767",
    "https://arxiv.org/abs/1905.13727",
    "https://arxiv.org/abs/1910.02054",
    "https://arxiv.org/abs/2006.15704",
    "https://arxiv.org/abs/2208.11035",
    "https://arxiv.org/abs/2311.08105",
    "https://arxiv.org/abs/2501.18512",
    "https://arxiv.org/abs/2507.03114",
    "https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc",
    "https://github.com/Oneflow-Inc/DLPerf",
    "https://github.com/horovod/horovod/blob/master/docs/benchmarks.rst",
    "https://github.com/horovod/horovod/issues/4290",
    "https://github.com/keras-team/keras/issues/18624",
    "https://github.com/keras-team/keras/issues/20585",
    "https://github.com/kubernetes-sigs/jobset",
    "https://github.com/pytorch/pytorch/blob/main/benchmarks/distributed/ddp/README.md",
    "https://github.com/ray-project/ray/issues/47464",
    "https://github.com/tensorflow/tensorflow/issues/97697",
    "https://semver.org",
    "https://www.cs.toronto.edu/~kriz/cifar.html",
    "https://www.tensorflow.org/guide/distributed_training",
}
LINK = re.compile(r"\]\(([^()\s]+)\)")


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


@pytest.mark.parametrize("page", sorted(guide.DOCS.glob("architecture*.md")), ids=lambda page: page.stem)
def test_the_files_that_the_architecture_names_exist(page: Path) -> None:
    """By their names or the ends of their paths; `NAME.py` stands for a file that one adds."""
    folders = ("src/dtrain", "tests", "benchmarks")
    files = [
        f"/{path.relative_to(guide.ROOT)}" for each in folders for path in guide.ROOT.glob(f"{each}/**/*.py")
    ]
    named = set(re.findall(r"[\w./]+\.py\b", page.read_text(encoding="utf-8")))
    named = {each.lstrip("./") for each in named}  # also where a link has the whole path
    missing = {name for name in named if not any(file.endswith(f"/{name}") for file in files)}
    assert {Path(name).name for name in missing} <= {"NAME.py"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly."""
    folder = tmp_path_factory.mktemp("site")
    done = build(guide.ROOT, folder)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "WARNING" not in done.stderr
    return folder


def test_the_site_asks_no_other_host_for_anything(site: Path) -> None:
    pages = {path.stem for path in site.glob("*.html")} - {"404"}
    assert pages == {path.stem for path in guide.pages()}
    for html in site.rglob("*.html"):
        text = html.read_text(encoding="utf-8")
        assert not re.findall(r"<(?:script|img|iframe)[^>]*src=\"?https?:", text), html
        assert not re.findall(r"<link rel=(?!\"?canonical)[^>]*href=\"?https?:", text), html
        assert 'data-md-component="source"' not in text, "Material would ask the repository's host"


def test_every_example_is_a_page_with_its_code(site: Path) -> None:
    for path in (guide.ROOT / "examples").glob("*.*"):
        page = site / "repository" / "examples" / f"{path.stem}.html"
        assert (page.parent / path.name).read_bytes() == path.read_bytes()
        assert 'class="highlight"' in page.read_text(encoding="utf-8")


def test_every_public_name_is_on_the_site_with_its_example(site: Path) -> None:
    shown = "\n".join(path.read_text(encoding="utf-8") for path in site.glob("reference/*.html"))
    names = public_names.names()
    wanted = {*names, *public_names.error_names()} - {"dtrain.errors.DtrainError"}  # it is dtrain.DtrainError
    assert not wanted - {*re.findall(r'id="(dtrain\.[\w.]+)"', shown)}
    assert shown.count("<summary>Example</summary>") == len(names) + len(public_names.errors_with_examples())


def test_links_to_the_repository_follow_one_setting(tmp_path: Path) -> None:
    folder = small_site(tmp_path, "# Home\n")
    urls = {"Repository": "https://host.example/a/dtrain", "Documentation": "https://docs.example/dtrain/"}
    lines = ["[project.urls]", *(f'{name} = "{url}"' for name, url in urls.items())]
    (folder / "pyproject.toml").write_text("\n".join(lines))
    done = build(folder, folder / "site")
    assert done.returncode == 0, done.stderr
    home = (folder / "site" / "index.html").read_text(encoding="utf-8")
    assert "https://host.example/a/dtrain/edit/main/docs/index.md" in home
    assert '<link rel="canonical" href="https://docs.example/dtrain/index.html">' in home
    inside = (folder / "site" / "repository" / "CONTRIBUTING.html").read_text(encoding="utf-8")
    assert "https://host.example/a/dtrain/edit/main/CONTRIBUTING.md" in inside


def small_site(folder: Path, home: str) -> Path:
    """A folder with the site's settings and hooks and one page."""
    settings = yaml.safe_load((guide.ROOT / "mkdocs.yml").read_text())
    settings["nav"] = [{"Home": "index.md"}]
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(settings))
    for name in ("hooks", "overrides", "stylesheets"):
        shutil.copytree(guide.DOCS / name, folder / "docs" / name)
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md"):  # which the hook brings in
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("# A page\n")
    (folder / "docs" / "index.md").write_text(home)
    return folder


def test_a_dead_link_fails_the_build(tmp_path: Path) -> None:
    """So that the test above can be believed."""
    (tmp_path / "there.py").write_text("")
    dead = ("nowhere.md", "../nowhere.py", "index.md#none", "../CONTRIBUTING.md#nor-here")
    links = " ".join(f"[link]({target})" for target in ("../there.py", "../CONTRIBUTING.md#a-page", *dead))
    done = build(small_site(tmp_path, f"# Home\n\n{links}\n"), tmp_path / "site")
    assert done.returncode != 0
    warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == len(dead), done.stderr
    for found in ("nowhere.md", "nowhere.py", "#none", "#nor-here"):
        assert sum(found in line for line in warnings) == 1, done.stderr


def test_every_page_is_in_the_navigation() -> None:
    text = (guide.ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = re.findall(r"^ +- .+: (\S+\.md)$", text, flags=re.M)
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


def test_every_error_is_on_the_page_of_troubleshooting() -> None:
    text = (guide.DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^### (\w+)$", text, flags=re.M))
    assert not {name.rpartition(".")[2] for name in public_names.error_names()} - shown


def test_the_messages_of_the_page_of_troubleshooting_are_those_of_the_source() -> None:
    """The words between what differs from case to case: `...`, and `/` between two messages."""
    source = "\n".join(texts_of_the_source())
    text = (guide.DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    own = text.partition("## dtrain's errors")[2].partition("## TensorFlow and Keras")[0]
    cells = re.findall(r"^\| (.+?) \| .* \|$", own, flags=re.M)
    messages = [cell for cell in cells if cell not in ("message", "words of the line")]
    assert len(messages) > 30
    parts = [part.strip(" ,.") for cell in messages for part in re.split(r"\.\.\.| / |\bN\b|\bM\b", cell)]
    assert [part for part in parts if len(part) > 3 and part not in source] == []


def texts_of_the_source() -> Iterator[str]:
    """Every string of the package; what an f-string fills in is a null character."""
    for path in (guide.ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_every_example_is_in_the_gallery() -> None:
    text = (guide.DOCS / "gallery.md").read_text(encoding="utf-8")
    there = {path.name for path in (guide.ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb")}
    assert {Path(target).name for target in LINK.findall(text) if "examples/" in target} == there


def words(page: str) -> str:
    """The prose of a page on one line."""
    return " ".join(prose(guide.ROOT / page).split())


def test_no_program_of_a_page_saves_a_model_on_the_chief_alone() -> None:
    """All workers save, under every strategy: `fully_sharded` refuses a worker that saves alone."""
    saving = {"save", "save_weights", "export"}
    for path in TEXTS:
        for block in guide.blocks(path.read_text(encoding="utf-8")):
            if block.language != "python":
                continue
            for node in ast.walk(ast.parse(block.text)):
                if isinstance(node, ast.If) and "is_chief()" in ast.unparse(node.test):
                    called = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
                    assert not called & saving, f"{path.name}: {ast.unparse(node)}"


@pytest.mark.parametrize("path", TEXTS, ids=IDS)
def test_the_promise_of_equal_numbers_names_its_precision(path: Path) -> None:
    text = words(str(path.relative_to(guide.ROOT)))
    assert "2e-4" not in text or "2e-4 relative in float32" in text


def test_what_a_worker_keeps_of_its_speed_is_the_measured_share() -> None:
    data = json.loads((guide.ROOT / "benchmarks/results/speed_workers.json").read_text(encoding="utf-8"))
    kept = {case: data["cases"][f"{case}-mpi"]["times_faster"]["pair"]["median"] for case in ("mid", "big")}
    assert kept["mid"] > 1, "pages say that it keeps all"
    for page in ("README.md", "benchmarks/README.md", "docs/speed.md", "docs/strategies.md"):
        assert f"{kept['big']:.0%}" in words(page), page


def test_a_program_changes_in_as_many_lines_on_every_page() -> None:
    """`test_readme.py` counts them."""
    for page in ("README.md", "docs/index.md"):
        found = re.findall(r"\b(\w+) lines (?:more|change)\b", words(page))
        assert [each.lower() for each in found] == ["four"], page
