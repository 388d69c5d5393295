"""Takes the addresses of the site and of the repository from `[project.urls]` of pyproject.toml.

`Documentation` becomes the site's own address, `Repository` the links to the repository and to the source of
each page. Without them the site has no such links.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

BRANCH = "main"
INSIDE = "repository/"  # as in repository_files.py


def on_config(config: Any) -> Any:
    """Sets what MkDocs itself reads from mkdocs.yml."""
    project = Path(config["config_file_path"]).parent / "pyproject.toml"
    found = tomllib.loads(project.read_text(encoding="utf-8")) if project.is_file() else {}
    urls = {name.lower(): url for name, url in found.get("project", {}).get("urls", {}).items()}
    config["site_url"] = urls.get("documentation", "")
    if repository := urls.get("repository", "").rstrip("/"):
        config["repo_url"] = f"{repository}/"
        config["repo_name"] = "/".join(repository.split("/")[-2:])
        config["edit_uri"] = f"edit/{BRANCH}/docs/"
    return config


def on_page_context(context: Any, page: Any, config: Any, nav: Any) -> Any:
    """Corrects the link to the source of a page that the other hook has brought in."""
    if config["repo_url"] and page.file.src_uri.startswith(INSIDE):
        path = page.file.src_uri.removeprefix(INSIDE)
        page.edit_url = f"{config['repo_url']}edit/{BRANCH}/{path}"
    return context
