"""Versions of resources: their list, lineage, texts, and the candidates of a search."""

from agl_inspect.versions.candidates import Candidate, searches_in
from agl_inspect.versions.lineage import ListedVersion, diff_versions, is_of_file, list_versions, resource_text, shown

__all__ = [
    "Candidate",
    "ListedVersion",
    "diff_versions",
    "is_of_file",
    "list_versions",
    "resource_text",
    "searches_in",
    "shown",
]
