"""The gated delta rule, which replaces a state's value for a key rather than adding to it.

    S = exp(g) S                          decay, g <= 0
    S = S + k (beta (v - k S))^T          write: what S holds for k moves towards v
    o = q S                               read

`S` `[k_dim, v_dim]` belongs to one head of one request, and is float32. Queries and keys have length 1 (queries are
scaled by `k_dim ** -0.5`, too), see `normalised`.

    reference_delta_rule   a token at a time, as above: the oracle of the others
    one_token              one token each of many requests
    chunks                 many tokens: within a chunk of C tokens everything is a matrix product
    scan                   on a CPU in C (`scan.c`): each state is read and written once, whatever the number of tokens;
                           torch passes over all states several times for a token, over all tokens for a chunk. Callers
                           check with `runs_in_c` that the kernel takes their tensors

In a chunk with state S before it, let d_i be the decay from the chunk's start to token i, and A the lower triangle
A_ij = beta_i (d_i / d_j) k_i k_j^T, j < i. The values that are written follow from one triangular system,

    (I + A) U = beta (V - d K S)
    O = d Q S + tril((d_i / d_j) Q K^T) U
    S = d_C S + ((d_C / d_j) K)^T U

Source: Yang et al., Gated Delta Networks, 2024, and Parallelizing Linear Transformers with the Delta Rule, 2024.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ubatch.kernels import compile_c, kernel_of

_EPS = 1e-6


def normalised(x: Tensor, scale: float) -> Tensor:
    """`x` `[..., heads, dim]` with heads of length `scale`, in float32."""
    x = x.float()
    return x * (x.square().sum(-1, keepdim=True) + _EPS).rsqrt() * scale


def reference_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One request, token by token.

    Args:
        q, k: `[T, heads, k_dim]`, normalised.
        v: `[T, heads, v_dim]`.
        g: `[T, heads]`, logarithm of the decay.
        beta: `[T, heads]`.
        state: `[heads, k_dim, v_dim]` before the tokens; not changed.

    Returns:
        `[T, heads, v_dim]`, and the state after the tokens.
    """
    rows = []
    for token in range(q.shape[0]):
        state = state * g[token].exp()[:, None, None]
        held = (state * k[token][:, :, None]).sum(1)
        written = (v[token] - held) * beta[token][:, None]
        state = state + k[token][:, :, None] * written[:, None, :]
        rows.append((state * q[token][:, :, None]).sum(1))
    return torch.stack(rows), state


def one_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """One token of each of R requests, `[R, heads, v_dim]`; arguments as in the reference, with R in place of T.

    Args:
        state: `[R, heads, k_dim, v_dim]`, dense; changed in place.
    """
    flat = state.mul_(g.exp()[..., None, None]).flatten(0, 1)  # a view: the state is dense
    keys = k.flatten(0, 1)
    held = torch.bmm(keys[:, None], flat)
    written = (v.flatten(0, 1)[:, None] - held) * beta.flatten()[:, None, None]
    flat.baddbmm_(keys[:, :, None], written)
    return torch.bmm(q.flatten(0, 1)[:, None], flat).view(v.shape)


def chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, running: Sequence[int]) -> Tensor:
    """Chunks of several requests, `[N, heads, C, v_dim]`: first the first chunk of each, then the second, and so on.

    Args:
        q, k: `[N, heads, C, k_dim]`, normalised.
        v: `[N, heads, C, v_dim]`.
        g, beta: `[N, heads, C]`; 0 for padding at the end of a request's last chunk.
        state: `[R, heads, k_dim, v_dim]`, the requests in an order of falling length; changed in place.
        running: number of requests that have a first chunk, a second one, and so on.
    """
    # Differences of sums that may be in the hundreds: float64, or the decays between near tokens lose digits.
    sums = g.double().cumsum(-1)
    decay = sums.float()
    size = g.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=g.device).triu(1)
    # Filled before `exp`: from a later token to an earlier one it would overflow.
    between = (sums[..., :, None] - sums[..., None, :]).float().masked_fill(later, float("-inf")).exp()
    k_beta = k * beta[..., None]
    turned = k.transpose(-1, -2)
    system = (k_beta @ turned) * between
    # U = V' - K' S: both right-hand sides do not need the state, so one solution serves all chunks at once.
    sides = torch.cat((v * beta[..., None], k_beta * decay.exp()[..., None]), dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    values, keys_of_state = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    scores = (q @ turned) * between
    from_state = q * decay.exp()[..., None]
    to_state = turned * (sums[..., -1:] - sums).float().exp()[..., None, :]
    whole = decay[..., -1].exp()[..., None, None]

    out = torch.empty_like(v)
    start = 0
    for count in running:
        here, own = slice(start, start + count), state[:count]
        written = values[here] - keys_of_state[here] @ own
        out[here] = from_state[here] @ own + scores[here] @ written
        own.mul_(whole[here]).add_(to_state[here] @ written)
        start += count
    return out


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
    fresh: Tensor,
    starts: Tensor,
    *,
    write: bool,
) -> Tensor:
    """All tokens of R requests, `[T, v_heads, v_dim]`.

    Args:
        q, k: `[T, k_heads, k_dim]` float32, normalised, dense.
        v: `[T, v_heads, v_dim]` float32, dense.
        g, beta: `[T, v_heads]` float32, dense in the last dimension, with the same stride.
        states: `[slots, v_heads, k_dim, v_dim]` float32, dense; changed in place.
        slots: `[R]` int64, where each request's state is; all different.
        fresh: `[R]` bool, whether a request begins with zeros instead.
        starts: `[R + 1]` int64, each request's first token, and their number.
        write: whether the states change.
    """
    out = torch.empty_like(v)
    _kernel()(
        *(states.data_ptr(), slots.data_ptr(), fresh.data_ptr(), starts.data_ptr(), len(slots)),
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr(), beta.data_ptr(), g.stride(0), out.data_ptr()),
        *(q.shape[1], *states.shape[1:], write, torch.get_num_threads()),
    )
    return out


@cache
def _kernel(**defines: int) -> Callable[..., None]:
    source = Path(__file__).with_name("scan.c").read_text(encoding="utf-8")
    pointer, number, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    types = (*[pointer] * 4, number, *[pointer] * 5, number, pointer, *[number] * 4, flag, flag)
    return kernel_of(compile_c(source, **defines), "scan", *types)
