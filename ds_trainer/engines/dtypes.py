"""Number formats: their names in the config, and torch's."""

import torch

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
