"""What these tests share: the library without network and progress bars, and a line about the versions and the largest
differences before the last line."""

import os
import sys
import tempfile

HOME = tempfile.TemporaryDirectory(prefix="diffv2_hub_home_")
os.environ.update(HF_HUB_OFFLINE="1", HF_HOME=HOME.name)  # before the import of transformers
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # flex attention without its compiler

import torch
import transformers

torch.set_num_threads(1)
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def pytest_sessionfinish():
    remarks = [getattr(sys.modules.get(name), "remark", str)() for name in ("test_hub", "test_reference")]
    print(
        f"     PyTorch {torch.__version__}, transformers {transformers.__version__}", *filter(None, remarks), sep=", "
    )
