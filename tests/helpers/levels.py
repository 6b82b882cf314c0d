"""The level of every package and root module of ds_trainer; docs/architecture.md states the same."""

# One line for each package and root module. A module imports its own level and the levels below.
LEVELS = {
    "errors": 0,
    "files": 0,
    "layout": 0,
    "log": 0,
    "metrics": 0,
    "plots": 0,
    "processes": 0,
    "run_folder": 0,
    "torch_internals": 0,
    "health": 1,
    "launch": 1,
    "planning": 1,
    "config": 2,
    "distributed": 3,
    "interop": 3,
    "loss": 3,
    "optim": 3,
    "callbacks": 4,
    "data": 4,
    "host": 4,
    "models": 4,
    "parallel": 5,
    "engines": 6,
    "checkpoint": 7,
    "executors": 7,
    "cli": 8,
    "trainer": 8,
}

# No module of these loads torch or transformers.
PURE = {
    "config",
    "errors",
    "files",
    "interop",
    "launch",
    "layout",
    "log",
    "metrics",
    "planning",
    "plots",
    "processes",
    "run_folder",
}
