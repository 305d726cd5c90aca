"""Saving and loading: what goes into a file, and the checks when it comes out."""

# ruff: noqa: F401 - the names that the shell and the verbs use
from lapwing.io.centers import pack_center
from lapwing.io.laplace import (
    SCHEMA,
    Saved,
    check_weights,
    check_writable,
    checked,
    pack_objects,
    pack_samples,
    pack_state,
)
from lapwing.io.posteriors import Content, SavedFit, checked_fit, members_of, pack_blended, pack_fitted
