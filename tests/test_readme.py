"""What the README and the pages in docs/ say is true: commands, configs, examples, numbers and links."""

import ast
import inspect
import json
import os
import re
import shlex
import sys
import tomllib
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_trainer.callbacks.progress import summary
from ds_trainer.cli import _parser as command_parser
from ds_trainer.cli import main
from ds_trainer.cli.train import config_from_arguments, parse_train_arguments
from ds_trainer.config.io import load_config
from ds_trainer.config.key_support_table import section_row
from ds_trainer.config.keys import leaf_fields
from ds_trainer.config.reference_page import document
from ds_trainer.config.resolve import resolve
from ds_trainer.config.resolved import Machine
from ds_trainer.errors import ConfigError
from ds_trainer.metrics import StepMetrics, read_metrics
from ds_trainer.planning.memory import bytes_per_parameter, ddp_bytes_per_parameter, fsdp2_bytes_per_parameter
from tests.helpers.table import table

ROOT = Path(__file__).parents[1]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"))}
README, ZERO, ENGINES, ARCHITECTURE, TOUR, DATA, TRAINER, UNATTENDED, COMMAND_LINE, TROUBLESHOOTING, VERIFICATION = (
    PAGES[name if name == "README.md" else f"docs/{name}"]
    for name in (
        "README.md",
        "zero.md",
        "engines.md",
        "architecture.md",
        "run_json.md",
        "data.md",
        "trainer.md",
        "unattended.md",
        "command_line.md",
        "troubleshooting.md",
        "verification.md",
    )
)


def blocks(text: str) -> list[tuple[str, str]]:
    """Language and content of every fenced block."""
    fence = re.compile(r"^(?P<ticks>`{3,})(?P<language>\w*)\n(?P<content>.*?)^(?P=ticks)$", re.DOTALL | re.MULTILINE)
    return [(found["language"], found["content"]) for found in fence.finditer(text)]


def of(language: str, text: str) -> list[str]:
    return [content for kind, content in blocks(text) if kind == language]


def of_all_pages(language: str) -> list[str]:
    """Content of every such block, each once."""
    return list(dict.fromkeys(content for text in PAGES.values() for content in of(language, text)))


def rows(text: str, first_heading: str) -> list[list[str]]:
    """Cells of the body of the table whose header begins with this cell, or these cells."""
    table = re.search(rf"^\| ?{re.escape(first_heading)} \|.*\n\|[ |-]+\|\n((?:\|.*\n)+)", text, flags=re.MULTILINE)
    assert table, first_heading
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines()]


COMMANDS = [
    shlex.split(line, comments=True)
    for line in dict.fromkeys(line for block in of_all_pages("bash") for line in block.splitlines())
]
CONFIG_COMMANDS = [command for command in COMMANDS if command[:2] == ["ds-trainer", "config"]]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder a reader stands in after writing the README's first config and its data."""
    (tmp_path / "run.json").write_text(of("json", README)[0])
    (tmp_path / "ds.json").write_text("{}")
    (tmp_path / "ds_config.json").write_text('{"train_batch_size": "auto", "zero_optimization": {"stage": 2}}')
    for name in ("train", "eval"):
        (tmp_path / f"{name}.jsonl").write_text(of("jsonl", DATA)[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def ran(capsys, command) -> tuple[int, str]:
    """Exit code and output of a `ds-trainer` command, run here."""
    try:
        code = main(command[1:])
    except SystemExit as stop:
        code = stop.code
    return code, "".join(capsys.readouterr())


def words(line: str) -> str:
    """A line of a table or of text without borders and with single spaces."""
    return " ".join(line.replace("│", " ").split())


@pytest.mark.parametrize("command", CONFIG_COMMANDS, ids=" ".join)
def test_a_config_command_does_what_it_says(folder, capsys, command):
    code, _ = ran(capsys, command)
    assert code == (2 if "optimizer.learning_rate=1e-4" in command else 0)


def test_the_printed_texts_are_what_the_commands_print(folder, capsys):
    (shown,), (fault,) = of("text", COMMAND_LINE), of("text", TROUBLESHOOTING)
    (show,) = [command for command in CONFIG_COMMANDS if command[2] == "show" and "--backend" not in command]
    (check,) = [command for command in CONFIG_COMMANDS if "optimizer.learning_rate=1e-4" in command]
    for text, command in ((shown, show), (fault, check)):
        _, output = ran(capsys, command)
        printed = [words(line) for line in output.splitlines()]
        assert [line for line in text.splitlines() if words(line) not in printed] == []


def test_every_other_command_is_one_that_exists(folder, monkeypatch):
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    recipe = shlex.split((ROOT / "Makefile").read_text(), comments=True)
    checks = {
        "make": lambda arguments: targets.issuperset(arguments),
        "pip": lambda arguments: set(arguments) <= {*recipe, "."},
        "deepspeed": lambda arguments: trains(arguments, monkeypatch),
        "torchrun": lambda arguments: trains(arguments, monkeypatch),
        "python": lambda arguments: (
            (ROOT / arguments[0]).is_file()
            and (arguments[0].startswith("benchmarks/") or trains(arguments, monkeypatch))
        ),
        "accelerate": lambda arguments: arguments[0] == "launch" and trains(arguments[1:], monkeypatch),
        "srun": lambda arguments: arguments[0] == "ds-trainer" and parses(arguments[1:]),
        "mpirun": lambda arguments: arguments[2] == "ds-trainer" and parses(arguments[3:]),
        "ds-trainer": parses,
    }
    for program, *arguments in COMMANDS:
        assert checks[program](arguments), (program, *arguments)


def parses(arguments: list[str]) -> bool:
    """Whether `ds-trainer` takes these arguments."""
    return isinstance(command_parser().parse_args(arguments), Namespace)


def trains(arguments: list[str], monkeypatch) -> bool:
    """Whether a launcher's arguments name our script and give it options that it takes and a config that loads."""
    start = arguments.index("examples/train.py")
    options = [name for name in arguments[:start] if name.startswith("--")]
    assert set(options) <= {"--num_gpus", "--nproc_per_node", "--multi_gpu", "--num_processes"}
    monkeypatch.setattr(sys, "argv", arguments[start:])
    config, _ = config_from_arguments(parse_train_arguments(ROOT / "examples/demo/demo.json"))
    return bool(config.model.path)


@table("text", [text for text in of_all_pages("json") if text not in of("json", ARCHITECTURE)])
def test_every_json_is_a_config(text):
    load_config(json.loads(text))


def test_the_tour_shows_every_section():
    shown = {section for text in of("json", TOUR) for section in json.loads(text)}
    assert shown == {key.split(".")[0] for key in leaf_fields()} - {"$schema"}


def test_every_data_record_is_tokenised_and_has_something_to_learn():
    from ds_trainer.data.encode import encode
    from tests.helpers.tokenizers import make_tokenizer

    for line in of("jsonl", DATA)[0].splitlines():
        assert encode(json.loads(line), make_tokenizer(), None, line).num_label_tokens > 0


@pytest.mark.parametrize("page", ["README.md", "docs/unattended.md"])
def test_the_printed_run_is_the_one_in_the_picture(page):
    lines = read_metrics(ROOT / "docs/images/loss.jsonl")
    steps = {str(line["step"]): summary(StepMetrics(**line)) for line in lines if "loss" in line}
    evaluated = {str(line["step"]): f"{line['eval_loss']:.4f}" for line in lines if "eval_loss" in line}
    text = of("text", PAGES[page])[0]
    printed = dict(re.findall(r"step (\d+)/20 \[[\d:<]+\]  (.*)", text))
    assert printed and printed.items() <= steps.items()
    assert dict(re.findall(r"step (\d+): eval loss (.*)", text)) == evaluated


def test_the_printed_tokens_of_the_evaluation_are_those_in_the_picture():
    lines = read_metrics(ROOT / "docs/images/loss.jsonl")
    assert f"{lines[0]['eval_num_tokens']:,} of them learned" in of("text", UNATTENDED)[0]


def test_the_printed_lines_on_the_set_up_have_the_words_of_the_code():
    printed = of("text", UNATTENDED)[0].splitlines()
    source = (ROOT / "ds_trainer/trainer/verify_setup.py").read_text()
    templates = re.findall(r'"((?:engine|parameters|batch|groups): .*%.*)"', source)
    shapes = [re.sub(r"%[sd]", ".*", re.escape(template)) for template in templates]
    assert len(shapes) == 4
    assert [shape for shape in shapes if not any(re.search(shape, line) for line in printed)] == []


SUPPORT = {
    "data parallelism": {},
    "optimizer on the CPU": {"zero.offload_optimizer.device": "cpu"},
    "optimizer and parameters on the CPU": {
        "zero.offload_optimizer.device": "cpu",
        "zero.offload_param.device": "cpu",
    },
    "optimizer on NVMe": {"zero.offload_optimizer.device": "nvme", "zero.offload_optimizer.nvme_path": "."},
    "tensor parallelism": {"parallel.tp": 2},
    "with sequence parallelism": {"parallel.tp": 2, "parallel.sequence_parallel": True},
    "pipeline": {"parallel.pp": 2},
    "tensor and pipeline": {"parallel.tp": 2, "parallel.pp": 2},
    "pipeline, optimizer on the CPU": {"parallel.pp": 2, "zero.offload_optimizer.device": "cpu"},
}


def resolves(keys: dict[str, object]) -> bool:
    """Whether a run with these dotted keys resolves on 8 GPUs."""
    config = {"model.path": "checkpoint", "data.train": "train.jsonl", "run.max_steps": 1, "batch.micro_size": 1}
    try:
        loaded = load_config({}, [f"{key}={json.dumps(item)}" for key, item in (config | keys).items()])
        resolve(*loaded, Machine(8, "cuda", ("fp32", "bf16", "fp16"), "a GPU"))
    except ConfigError:
        return False
    return True


def test_the_readmes_table_of_what_works_with_what_is_what_a_config_check_says():
    engines, wrong = ("deepspeed", "fsdp2", "ddp", "accelerate"), {}
    for name, *cells in rows(README, "| deepspeed"):
        for engine, cell in zip(engines, cells, strict=True):
            if name not in SUPPORT:
                assert cell == "yes"
                continue
            keys = SUPPORT[name] | {"parallel.engine": engine}
            stages = [str(stage) for stage in range(4) if resolves(keys | {"zero.stage": stage})]
            actual = ", ".join(stages) or ("yes" if resolves(keys) else "no")
            if cell != actual:
                wrong[name, engine] = f"{cell}; should be {actual}"
    assert not wrong


def test_the_engines_table_says_what_the_code_does():
    sections = dict.fromkeys(key.split(".")[0] for key in leaf_fields() if key != "$schema")
    assert rows(ENGINES, "section") == [[section, *section_row(section)] for section in sections]


def test_the_engines_pages_bytes_are_those_of_the_planner():
    for engine, ranks, *numbers in rows(ENGINES, "engine | ranks"):
        match engine.split():
            case ["ddp"]:
                row = ddp_bytes_per_parameter("bf16")
            case ["fsdp2"]:
                row = fsdp2_bytes_per_parameter("bf16", "fp32", int(ranks))
            case [*_, stage]:
                row = bytes_per_parameter(int(stage), "bf16", "fp32", int(ranks))
        assert numbers == [f"{size:.4g}" for size in (row.after_backward, row.after_step)]


OFFLOAD = {"device": "none", "cpu": "cpu", "nvme": "nvme"}


def test_the_bytes_on_8_ranks_are_those_of_the_planner():
    for stage, optimizer, parameters, *numbers in rows(ZERO, "stage | optimizer"):
        places = {"offload_optimizer": OFFLOAD[optimizer], "offload_param": OFFLOAD[parameters]}
        row = bytes_per_parameter(int(stage), "bf16", "fp32", 8, **places)
        device = (row.after_backward - row.host, row.after_step - row.host)
        assert [float(number) for number in numbers] == [*device, row.host, row.nvme, row.paper]


def test_the_bytes_of_the_zero_page_are_those_of_the_planner():
    table = rows(ZERO, "stage | compute")
    assert len({tuple(row[:5]) for row in table}) == len(table) == 29
    for stage, dtype, grad_dtype, optimizer, parameters, *numbers in table:
        places = {"offload_optimizer": OFFLOAD[optimizer], "offload_param": OFFLOAD[parameters]}
        row = bytes_per_parameter(int(stage), dtype, grad_dtype, 2, **places)
        assert [float(n) for n in numbers] == [row.after_backward, row.after_step, row.host, row.nvme, row.paper]


def test_the_tolerances_are_those_of_the_parity_tests():
    from tests.helpers.parity import GRADIENT_TOLERANCE, LOSS_TOLERANCE, OPTIMIZERS, STEPS, WEIGHT_TOLERANCE

    stated = [float(row[1]) for row in rows(VERIFICATION, "what")]
    assert stated == [LOSS_TOLERANCE, GRADIENT_TOLERANCE, GRADIENT_TOLERANCE, *WEIGHT_TOLERANCE.values()]
    assert f"{STEPS} steps" in " ".join(VERIFICATION.split()) and OPTIMIZERS["adamw"]["eps"] == 1e-4


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Every string of a module; what an f-string fills in is left out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "\0".join(part.value if isinstance(part, ast.Constant) else "" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_every_message_that_is_explained_is_one_of_ours():
    texts = [text for path in (ROOT / "ds_trainer").rglob("*.py") for text in texts_of(ast.parse(path.read_bytes()))]
    unknown = []
    for line in re.findall(r"^- (`.+`): ", re.sub(r"\n  +", " ", TROUBLESHOOTING), flags=re.MULTILINE):
        for message in re.findall(r"`(.+?)`", line.partition("`: ")[0] + "`"):
            unknown += [part for part in message.split("...") if not any(part in text for text in texts)]
    assert not unknown


def test_the_page_of_keys_is_the_generated_one():
    assert PAGES["docs/configuration.md"] == document(), (
        "python -m ds_trainer.config.reference_page > docs/configuration.md"
    )


def test_the_arguments_of_the_trainer_are_all_there():
    from ds_trainer import Trainer

    stated = {name for row in rows(TRAINER, "argument") for name in re.findall(r"`(\w+)`", row[0])}
    parameters = inspect.signature(Trainer).parameters
    assert stated == {name for name, parameter in parameters.items() if parameter.kind != parameter.VAR_KEYWORD}


def test_the_lower_bounds_are_those_of_the_package():
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    stated = re.findall(r"`(\w+>=[\d.]+)`", README)
    assert stated and set(stated) <= set(required)


def anchors(text: str) -> set[str]:
    """The fragments by which GitHub names a page's headings."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@table("page", PAGES)
def test_every_link_leads_somewhere(page):
    nowhere = []
    for path, fragment in re.findall(r"\]\(([^)#]*)(?:#([^)]+))?\)", PAGES[page]):
        target = (ROOT / page).parent.joinpath(path) if path else ROOT / page
        if "://" not in path and not (target.exists() and (not fragment or fragment in anchors(target.read_text()))):
            nowhere.append((path, fragment))
    assert not nowhere


def test_the_examples_are_all_there():
    listed = {cell for row in rows(README, "script in examples/") for cell in re.findall(r"\((.+)\)", row[0])}
    assert listed == {path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").glob("*.py")}


def test_the_folders_beside_the_package_are_there():
    listed = [row[0].strip("`") for row in rows(ARCHITECTURE, "beside the package")]
    assert listed and [path for path in listed if not (ROOT / path).is_dir()] == []


def test_the_tree_has_every_package_and_root_module_with_the_level_that_is_enforced():
    from tests.helpers.levels import LEVELS, PURE

    stated = {}
    for where, level, _ in rows(ARCHITECTURE, "where"):
        path = ROOT / where.strip("`")
        assert path.is_dir() == where.endswith("/`") and path.exists(), where
        stated[path.stem] = level
    assert stated == {name: f"{level}, pure" if name in PURE else str(level) for name, level in LEVELS.items()}


def test_the_engine_table_has_every_member_of_the_protocol():
    from ds_trainer.engines.base import Engine

    stated = {name for row in rows(ARCHITECTURE, "call") for name in re.findall(r"`(\w+)", row[0])}
    members = {name for name in {*vars(Engine), *Engine.__annotations__} if not name.startswith("_")}
    assert stated == members - {"module"}


def run_the_trainer_example(folder: Path) -> dict:
    os.chdir(folder)
    names: dict = {}
    exec(of("python", TRAINER)[0], names)
    return names["metrics"]


def test_the_trainer_example_runs_and_its_model_loads(world, tmp_path):
    from transformers import AutoModelForCausalLM

    from tests.helpers.checkpoints import make_checkpoint

    make_checkpoint(tmp_path / "checkpoint")
    (metrics,) = {tuple(sorted(found.items())) for found in world(run_the_trainer_example, 2, tmp_path)}
    assert [name for name, _ in metrics] == ["eval_accuracy", "eval_loss"]
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "outputs/my-model", output_loading_info=True)
    assert not any(info.values())


def train_on(engine: str, out: Path, plugins: Path) -> tuple[str, dict]:
    from tests.helpers.runs import make_trainer, weights

    sys.path.insert(0, str(plugins))
    trainer = make_trainer("ddp", out, parallel={"engine": engine}, run={"max_steps": 2})
    trainer.train()
    return type(trainer.engine).__name__, weights(trainer)


def test_the_engine_of_the_architecture_page_is_found_and_gives_ddps_weights(world, tmp_path):
    from tests.helpers.runs import largest_difference

    (tmp_path / "one_buffer.py").write_text(of("python", ARCHITECTURE)[0])
    installed = tmp_path / "one_buffer-1.0.dist-info"
    installed.mkdir()
    points = tomllib.loads(of("toml", ARCHITECTURE)[0])["project"]["entry-points"]
    (group, names), (asked,) = *points.items(), map(json.loads, of("json", ARCHITECTURE))
    lines = [f"[{group}]", *(f"{name} = {target}" for name, target in names.items())]
    (installed / "entry_points.txt").write_text("\n".join(lines))
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: one_buffer\nVersion: 1.0\n")
    ours = world(train_on, 2, asked["parallel"]["engine"], tmp_path, tmp_path)
    theirs = world(train_on, 2, "ddp", tmp_path, tmp_path)
    assert [name for name, _ in ours] == ["OneBufferEngine"] * 2
    assert all(largest_difference(a, b) < 1e-6 for (_, a), (_, b) in zip(ours, theirs, strict=True))
