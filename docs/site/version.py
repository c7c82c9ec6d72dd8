"""The version of Tessera, shown beside its name on each page of the site."""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig

import tessera as ts


def on_config(config: MkDocsConfig) -> None:
    config.site_name = f"{config.site_name} {ts.__version__}"
