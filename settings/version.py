"""Which version is this? The one that `--version` tells, and that stands above the newest part of CHANGELOG.md."""

VERSION = "0.2.0"
