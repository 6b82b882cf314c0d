"""`ds-trainer export` before it reads a checkpoint, and `ds-trainer --version`."""

from importlib.metadata import version

import pytest

from ds_trainer.cli import main


def stopped(capsys, *argv):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    said = capsys.readouterr()
    return stop.value.code, said.out + said.err


@pytest.mark.case("N15")
def test_a_folder_that_is_not_empty_is_replaced_only_where_that_is_asked_for(tmp_path, capsys):
    full, empty = tmp_path / "full", tmp_path / "empty"
    full.mkdir(), empty.mkdir()
    (full / "model.safetensors").write_text("of another run")
    gone = str(tmp_path / "checkpoint-1")
    for out in (full, full / "model.safetensors"):
        code, said = stopped(capsys, "export", gone, "--out", str(out))
        assert code == 2 and f"{out} exists and is not empty" in said and "--overwrite" in said
    for argv in (["--out", str(empty)], ["--out", str(full), "--overwrite"]):
        code, said = stopped(capsys, "export", gone, *argv)
        assert code == 2 and "checkpoint-1 does not exist" in said


@pytest.mark.case("N15")
def test_the_version_is_that_of_the_package(capsys):
    assert stopped(capsys, "--version") == (0, f"ds-trainer {version('ds_trainer')}\n")
