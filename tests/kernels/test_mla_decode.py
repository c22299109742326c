import pytest
import torch

from triax.errors import UnsupportedError
from triax.kernels.mla import decode

ON_GPU = torch.cuda.is_available()


def paged(lengths, W=1, H=3, L=40, V=32, page=64, dtype=torch.float32, device="cpu", extra=2):
    """Queries, pages in shuffled order with NaN where no token is, and their table."""
    counts = [-(-n // page) for n in lengths]
    latent = torch.full((sum(counts) + extra, page, L), torch.nan)
    order = torch.randperm(sum(counts)) + 1
    table = torch.zeros(len(lengths), max(*counts, 1) + 1, dtype=torch.int32)
    flat, first = [], 0
    for row, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        own = order[first : first + count]
        table[row, :count] = own.int()
        tokens = torch.randn(n, L)
        flat.append(tokens)
        for i, p in enumerate(own):
            part = tokens[i * page : (i + 1) * page]
            latent[p, : len(part)] = part
        first += count
    query = torch.randn(len(lengths), W, H, L)
    return query.to(device, dtype), latent.to(device, dtype), table.to(device), flat


def expected(query, flat, seen, scale, V):
    out = torch.zeros(*query.shape[:3], V, dtype=torch.float64)
    for row, tokens in enumerate(flat):
        for w, count in enumerate(seen[row].tolist()):
            if count:
                keys = tokens[:count].to(query.dtype).double()
                out[row, w] = (query[row, w].double().cpu() @ keys.T * scale).softmax(-1) @ keys[:, :V]
    return out


def test_each_query_averages_what_it_sees_of_its_own_pages():
    lengths = [1, 64, 65, 200, 0]
    query, latent, table, flat = paged(lengths, W=2)
    seen = torch.tensor([[max(n - 1, 0), n] for n in lengths], dtype=torch.int32)
    found = decode(query, latent, table, seen, 0.3, 32)
    torch.testing.assert_close(found.double(), expected(query, flat, seen, 0.3, 32), rtol=1e-5, atol=1e-5)


@pytest.mark.kernel
@pytest.mark.skipif(ON_GPU, reason="the kernels are compiled here; the gpu tests run them")
@pytest.mark.parametrize(("L", "V", "H", "W"), [(40, 32, 3, 2), (32, 32, 20, 1), (80, 48, 16, 1)])
def test_interpreted_kernels_give_the_definition(L, V, H, W):
    split = pytest.importorskip("triax.kernels.mla.split")
    lengths = [1, 40, 0, 150]
    query, latent, table, flat = paged(lengths, W=W, H=H, L=L, V=V, page=32)
    seen = torch.tensor([[max(n - W + 1 + w, 0) for w in range(W)] for n in lengths], dtype=torch.int32)
    found = split.decode(query, latent, table, seen, 0.3, V)
    torch.testing.assert_close(found.double(), expected(query, flat, seen, 0.3, V), rtol=1e-5, atol=1e-5)


@pytest.mark.kernel
def test_pages_without_a_kernel_are_refused_by_name():
    split = pytest.importorskip("triax.kernels.mla.split")
    query, latent, table, _ = paged([5], page=12)
    with pytest.raises(UnsupportedError, match="pages of `12` tokens"):
        split.decode(query, latent, table, torch.tensor([[5]]), 1.0, 32)


def test_parts_fill_the_last_wave_of_programs():
    split = pytest.importorskip("triax.kernels.mla.split")
    assert split.splits(64, 128, 132) == 2
    assert split.splits(1, 128, 132) > 16
    assert split.splits(500, 128, 132) == 1
    assert split.splits(1, 1, 132) == 1


@pytest.mark.kernel
@pytest.mark.parametrize("columns", [96, 64, 16])
def test_the_hopper_kernel_compiles_to_products_that_wait_for_nothing(assembled, columns):
    hopper = pytest.importorskip("triax.kernels.mla.hopper")
    ring = hopper.ring_pages(columns)
    defines = (("HEADS", columns), ("RING", ring), ("INFINITY", "__int_as_float(0x7f800000)"))
    code = assembled("\n".join([hopper.products(columns), *(path.read_text() for path in hopper.SOURCES)]), defines)
    assert code.stack == 0  # bytes of registers spilled, a thread
    assert code.registers <= 128  # of 512 threads
    assert code.sass.count("HGMMA") == 26
    assert code.sass.count("WARPGROUP.DEPBAR") <= 4  # where the assembler loses sight of a product, it waits after each
    assert hopper.shared_bytes(columns, ring) <= 227 * 1024


@pytest.mark.gpu
@pytest.mark.parametrize("H", [1, 8, 24, 96, 128])
@pytest.mark.parametrize(("lengths", "W"), [([1, 64, 3000, 0, 129], 1), ([4097], 3), ([70] * 40, 2)])
def test_kernels_on_a_gpu_give_the_definition_and_read_nothing_that_no_token_wrote(lengths, W, H):
    query, latent, table, flat = paged(lengths, W=W, H=H, L=576, V=512, dtype=torch.bfloat16, device="cuda")
    seen = torch.tensor([[max(n - W + 1 + w, 0) for w in range(W)] for n in lengths], dtype=torch.int32).cuda()
    found = decode(query, latent, table, seen, 0.07, 512)
    right = expected(query, flat, seen, 0.07, 512)
    assert ((found.double().cpu() - right).norm() / right.norm()).item() < 4e-3
    assert torch.equal(found, decode(query, latent, table, seen, 0.07, 512))


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [0.3, 1.0])
def test_logits_that_grow_from_page_to_page_are_weighed_by_the_largest(scale):
    query, latent, table, flat = paged([900, 3000], H=96, L=576, V=512, dtype=torch.bfloat16, device="cuda")
    seen = torch.tensor([[900], [3000]]).cuda()
    found, right = decode(query, latent, table, seen, scale, 512), expected(query, flat, seen, scale, 512)
    assert ((found.double().cpu() - right).norm() / right.norm()).item() < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_widths_and_pages_on_a_gpu_too(dtype):
    query, latent, table, flat = paged([50, 300], H=3, L=80, V=48, page=32, dtype=dtype, device="cuda")
    seen = torch.tensor([[50], [300]]).cuda()
    found, right = decode(query, latent, table, seen, 0.2, 48), expected(query, flat, seen, 0.2, 48)
    assert ((found.double().cpu() - right).norm() / right.norm()).item() < (1e-5 if dtype is torch.float32 else 5e-3)


@pytest.mark.gpu
def test_a_graph_of_paged_attention_follows_new_lengths():
    query, latent, table, _ = paged([500, 700], H=96, L=576, V=512, dtype=torch.bfloat16, device="cuda")
    seen = torch.tensor([[500], [700]]).cuda()
    decode(query, latent, table, seen, 0.07, 512)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = decode(query, latent, table, seen, 0.07, 512)
    for lengths in ([500, 700], [3, 64], [0, 65]):
        seen.copy_(torch.tensor(lengths)[:, None])
        graph.replay()
        assert torch.equal(found, decode(query, latent, table, seen, 0.07, 512))
