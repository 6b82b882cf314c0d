"""What is kept of the continuations, whichever run is resumed from where, and that a full disk does not end a run."""

import json

from ds_trainer.trainer.eval_samples import Generation, show_samples, write_samples


def made(step, text="sat", index=0):
    return Generation(step=step, index=index, prompt="the cat ", generated=text, reference="sat on the mat")


def kept(path):
    return [(line["step"], line["generated"]) for line in map(json.loads, path.read_text("utf-8").split("\n")[:-1])]


def test_evaluations_are_kept_one_after_the_other(tmp_path):
    path = tmp_path / "out" / "generations.jsonl"
    for step in (0, 10, 20):
        write_samples(path, [made(step, "a"), made(step, "b", index=1)])
    assert kept(path) == [(step, text) for step in (0, 10, 20) for text in "ab"]
    assert json.loads(path.read_text("utf-8").split("\n")[1]) == {
        "step": 0,
        "index": 1,
        "prompt": "the cat ",
        "generated": "b",
        "reference": "sat on the mat",
    }


def test_a_resumed_run_replaces_the_lines_of_the_steps_it_takes_again(tmp_path):
    path = tmp_path / "generations.jsonl"
    for step in (10, 20, 30):
        write_samples(path, [made(step, "before")])
    write_samples(path, [made(20, "after")])
    assert kept(path) == [(10, "before"), (20, "after")]


def test_every_character_that_might_end_a_line_comes_back(tmp_path):
    path, text = tmp_path / "generations.jsonl", "a\nb\r\nc\u2028d\x85e"
    write_samples(path, [made(1, text)])
    write_samples(path, [made(2)])
    assert kept(path) == [(1, text), (2, "sat")]


def test_what_cannot_be_written_is_said_and_does_not_end_the_run(tmp_path, capsys):
    (tmp_path / "file").touch()
    write_samples(tmp_path / "file" / "generations.jsonl", [made(1)])
    damaged = tmp_path / "generations.jsonl"
    damaged.write_text("no JSON\n")
    write_samples(damaged, [made(1)])
    assert capsys.readouterr().err.count("continuations are only shown") == 2
    assert damaged.read_text() == "no JSON\n"


def test_what_is_shown_is_the_end_of_the_prompt_and_the_beginning_of_the_answers(capsys):
    show_samples([Generation(7, 2, prompt="x" * 400 + "end", generated="start\nmore" + "y" * 400, reference="z")])
    assert capsys.readouterr().err.split("\n") == [
        "[ds_trainer] step 7, evaluation sample 2, generated between ⟦ ⟧:",
        f"  … {'x' * 297}end⟦start",
        f"  more{'y' * 290} …⟧",
        "  reference: ⟦z⟧",
        "",
    ]
