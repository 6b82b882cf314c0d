"""The FSDP2 file of a run is plain Python, without branches that its settings have decided."""

import pytest

from ds_trainer.config.io import load_config
from ds_trainer.config.resolve import resolve
from ds_trainer.config.resolved import Machine
from ds_trainer.interop.torch.snippet import fsdp2_snippet


@pytest.mark.case("N15")
@pytest.mark.parametrize("policy", ["transformer_based_wrap", "size_based_wrap", "no_wrap"])
@pytest.mark.parametrize("reshard", [True, False])
def test_no_branch_is_left_over(policy, reshard):
    fsdp = {"auto_wrap_policy": policy, "reshard_after_forward": reshard}
    text = fsdp2_snippet(resolve(*load_config({"parallel": {"engine": "fsdp2"}, "fsdp": fsdp}), Machine(2)))
    compile(text, "wrap.py", "exec")
    assert ("False if parts else True" in text) == (reshard and policy != "no_wrap")
    assert "False if parts else False" not in text and "else False" not in text.replace("embeddings() else False", "")
    assert ("for part in reversed(parts)" in text) == (policy != "no_wrap")
