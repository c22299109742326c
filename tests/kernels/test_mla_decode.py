import torch

from triax.kernels.mla import decode


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
