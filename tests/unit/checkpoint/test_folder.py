"""A checkpoint's folder, and a process that is killed at any of its calls."""

import shutil

import pytest

from ds_trainer.checkpoint.folder import (
    TRIAL,
    checkpoints,
    commit,
    file_faults,
    fingerprint,
    folder_of,
    manifest_faults,
    remove_unfinished_saves,
)
from ds_trainer.files import partial_path


class Killed(BaseException):
    pass


def save(out, text):
    folder = folder_of(out, 4)
    aside = partial_path(folder)
    aside.mkdir()
    (aside / "state").write_text(text)
    commit(aside, folder, {"state": fingerprint(aside / "state")})
    return folder


def test_a_checkpoint_that_replaces_another_is_in_place_before_the_other_is_removed(tmp_path, monkeypatch):
    save(tmp_path, "first")
    removals = []

    def die_at_removal(path, ignore_errors=False):
        if path.exists():
            removals.append(path)
            raise Killed

    monkeypatch.setattr(shutil, "rmtree", die_at_removal)
    with pytest.raises(Killed):
        save(tmp_path, "second")
    monkeypatch.undo()
    (folder,) = checkpoints(tmp_path)
    files, faults = manifest_faults(folder)
    assert not faults + file_faults(folder, files, files)
    assert (folder / "state").read_text() == "second"
    assert removals == [tmp_path / ".checkpoint-4.removed"]
    remove_unfinished_saves(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]


def test_what_a_killed_trial_save_has_left_is_removed(tmp_path):
    folder = tmp_path / f"{TRIAL}killed"
    folder.mkdir()
    (folder / "state.json").touch()
    remove_unfinished_saves(tmp_path)
    assert not list(tmp_path.iterdir())
