"""What shares a trainer is refused or keeps torch's rules: of one rank, in this process."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from detcompile import UnsupportedModel
from tests.training.cases import trained


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("rank") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_torchs_replicas_are_refused_as_they_add_rounded_gradients():
    with pytest.raises(UnsupportedModel, match=r"trainer\.shard\(\)"):
        DistributedDataParallel(trained("qwen3"))
    with pytest.raises(UnsupportedModel, match=r"trainer\.shard\(\)"):
        trained("qwen3")._replicate_for_data_parallel()  # as DataParallel does for each of several GPUs
