"""The product of one row, interpreted, against torch's own."""

import pytest
import torch

from triax.errors import UnsupportedError

pytest.importorskip("triton")

from triax.kernels.linear import single


@pytest.mark.parametrize(("inputs", "outputs"), [(2304, 5), (128, 40), (96, 17), (1, 3), (100, 2)])
def test_a_row_is_multiplied_as_by_torch(inputs, outputs):
    hidden, weight = torch.randn(1, inputs), torch.randn(outputs, inputs)
    torch.testing.assert_close(single.linear(hidden, weight), hidden @ weight.T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(single.linear(hidden[0], weight), weight @ hidden[0], rtol=1e-4, atol=1e-4)


def test_more_rows_are_refused_by_number():
    with pytest.raises(UnsupportedError, match="2 rows"):
        single.linear(torch.randn(2, 8), torch.randn(3, 8))


@pytest.mark.kernel
@pytest.mark.parametrize("inputs", [2304, 4096, 7168])
def test_the_kernel_compiles_for_hopper_without_spills(hopper, inputs):
    columns, rows = single.tile(inputs)
    types = {"row": "*bf16", "weight": "*bf16", "output": "*bf16", "R": "i32u"}
    wanted = {"module": "triax.kernels.linear.single", "kernel": "_multiply", "types": types,
              "constants": {"D": inputs, "BR": rows, "BD": columns}, "options": {"num_warps": 4}}  # fmt: skip
    assert hopper([wanted])[0].stack == 0


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 2304), (2304, 12576), (128, 4096), (2304, 256), (1000, 77)])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_a_row_is_multiplied_on_a_gpu(shape, dtype):
    hidden, weight = torch.randn(1, shape[0]).bfloat16(), torch.randn(shape[::-1]).bfloat16()
    found = single.linear(hidden.cuda(), weight.cuda(), dtype).cpu().double()
    expected = hidden.double() @ weight.double().T
    assert ((found - expected).norm() / expected.norm()).item() < (4e-3 if dtype is None else 1e-5)
