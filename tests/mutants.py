"""Wrong decodes that look right: each is the oracle with one mistake of the kind that kernels make.

`rejects` says whether the suite's judgement sees it. A mutant's `applies` says for which cases the
mistake makes a difference at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from cases import FLOAT8, FN, FNUZ, Case, Problem
from compare import check, out_dtype
from running import oracle
from torch import Tensor

Result = tuple[Tensor, Tensor]
Decode = Callable[[Case, Problem], Result]


class Mutant(NamedTuple):
    name: str
    decode: Decode
    applies: Callable[[Case], bool]


def _longest(case: Case) -> int:
    return max(case.lengths, default=0)


def _always(case: Case) -> bool:
    return _longest(case) >= case.q_len


MUTANTS: list[Mutant] = []


def mutant(applies: Callable[[Case], bool] = _always) -> Callable[[Decode], Decode]:
    def add(decode: Decode) -> Decode:
        MUTANTS.append(Mutant(decode.__name__, decode, lambda c: _always(c) and applies(c)))
        return decode

    return add


def right(case: Case, problem: Problem) -> Result:
    """No mistake."""
    return oracle(problem)


def rejects(case: Case, decode: Decode, problem: Problem, want: Tensor, want_lse: Tensor) -> bool:
    """Judge what a decode gives, in the types in which an op would give it."""
    out, lse = decode(case, problem)
    try:
        check(case, out.to(out_dtype(case)), want, lse.float(), want_lse)
    except AssertionError:
        return True
    return False


def _pieces(problem: Problem, count: int) -> list[Result]:
    """Attention over `count` runs of tokens each, which together are all of them."""
    q, cache, table, lengths, _ = problem.arguments
    page_size = cache.shape[1]
    every = torch.arange(table.shape[1] * page_size)
    slots = table.clamp(0, cache.shape[0] - 1)[:, every // page_size] * page_size
    slots = slots + every % page_size
    rows = cache.reshape(-1, 1, cache.shape[-1])
    causal = problem.options["causal"]
    results = []
    for i in range(count):
        outs, lses = [], []
        # One query token at a time, as a non-causal problem over the tokens it sees.
        for s in range(q.shape[1]):
            seen = (lengths - (q.shape[1] - 1 - s if causal else 0)).clamp(min=0)
            begin, end = seen * i // count, seen * (i + 1) // count
            shifted = (begin[:, None] + every).clamp(max=len(every) - 1)
            part = problem._replace(
                q=q[:, s : s + 1],
                kv_cache=rows,
                block_table=slots.gather(1, shifted).int(),
                seq_lens=(end - begin).int(),
                options={**problem.options, "causal": False},
            )
            out, lse = oracle(part)
            outs.append(out)
            lses.append(lse)
        results.append((torch.cat(outs, 1), torch.cat(lses, 1)))
    return results


def _merge(pieces: list[Result]) -> Result:
    lse = torch.stack([piece[1] for piece in pieces]).logsumexp(0)
    weights = [(piece[1] - lse).exp().nan_to_num(0.0)[..., None] for piece in pieces]
    out = sum(weight * piece[0] for weight, piece in zip(weights, pieces, strict=True))
    return out, lse


def split_and_merged(case: Case, problem: Problem) -> Result:
    """No mistake either: the pieces of the mutants below are right."""
    return _merge(_pieces(problem, 4))


# The seven of the design.


@mutant(lambda c: c.page_size > 1 and _longest(c) > 1)
def first_token_of_each_page(case: Case, problem: Problem) -> Result:
    """A page size that is overwritten with 0: row 0 of page i stands for token i."""
    pages = (problem.seq_lens + case.page_size - 1) // case.page_size
    return oracle(problem._replace(kv_cache=problem.kv_cache[:, :1], seq_lens=pages))


@mutant(lambda c: _longest(c) > 1)
def first_eighth(case: Case, problem: Problem) -> Result:
    return oracle(problem._replace(seq_lens=(problem.seq_lens + 7) // 8))


@mutant()
def zeros(case: Case, problem: Problem) -> Result:
    out, lse = oracle(problem)
    return torch.zeros_like(out), lse


@mutant()
def q_over_24(case: Case, problem: Problem) -> Result:
    """Reads no cache at all."""
    return problem.q[..., : case.rank].double() / 24, oracle(problem)[1]


@mutant(lambda c: _longest(c) >= 2 * c.q_len)
def reduce_skipped(case: Case, problem: Problem) -> Result:
    """The first split's own result is left in the output."""
    return _pieces(problem, 2)[0]


@mutant(lambda c: _longest(c) >= 4 * c.q_len)
def one_split_dropped(case: Case, problem: Problem) -> Result:
    return _merge(_pieces(problem, 4)[:-1])


@mutant(lambda c: len(c.lengths) > 1 and not c.share_pages and min(c.lengths) > 0)
def neighbours_page(case: Case, problem: Problem) -> Result:
    """The first page of each sequence is that of the next one."""
    table = problem.block_table.clone()
    table[:, 0] = table[:, 0].roll(1)
    return oracle(problem._replace(block_table=table))


# More of them.


@mutant(lambda c: c.causal and _longest(c) > c.q_len)
def sees_one_token_less(case: Case, problem: Problem) -> Result:
    return oracle(problem._replace(seq_lens=(problem.seq_lens - 1).clamp(min=0)))


@mutant(lambda c: c.causal and c.q_len > 1)
def sees_one_token_more(case: Case, problem: Problem) -> Result:
    """Query tokens but the last see the one behind them."""
    out, lse = oracle(problem)
    for s in range(case.q_len - 1):
        query = problem.q[:, [s + 1, s + 1]].clone()
        query[:, 0] = query[:, 1] = problem.q[:, s]
        short = problem._replace(q=query, seq_lens=problem.seq_lens - (case.q_len - 2 - s))
        short = short._replace(seq_lens=short.seq_lens.clamp(min=0))
        moved, moved_lse = oracle(short)
        out[:, s], lse[:, s] = moved[:, 1], moved_lse[:, 1]
    return out, lse


@mutant(lambda c: c.q_len > 1)
def mask_forgotten_or_added(case: Case, problem: Problem) -> Result:
    options = {**problem.options, "causal": not problem.options["causal"]}
    return oracle(problem._replace(options=options))


@mutant(lambda c: _longest(c) > 1)
def lse_in_base_2(case: Case, problem: Problem) -> Result:
    out, lse = oracle(problem)
    return out, lse / torch.log(torch.tensor(2.0)).item()


@mutant(lambda c: min(c.lengths) < (c.q_len if c.causal else 1))
def lse_of_the_unseeing_is_0(case: Case, problem: Problem) -> Result:
    out, lse = oracle(problem)
    return out, lse.clamp(min=-1e30).where(lse != -torch.inf, 0.0)


@mutant(lambda c: min(c.lengths) < (c.q_len if c.causal else 1))
def rows_of_the_unseeing_left_as_they_were(case: Case, problem: Problem) -> Result:
    out, lse = oracle(problem)
    return out.masked_fill(lse[..., None] == -torch.inf, 1e-20), lse


@mutant(lambda c: c.cache_dtype in FLOAT8)
def values_without_kv_scale(case: Case, problem: Problem) -> Result:
    out, lse = oracle(problem)
    return out / problem.options["kv_scale"].double(), lse


@mutant(lambda c: c.cache_dtype in FLOAT8 and _longest(c) > 1)
def scores_without_kv_scale(case: Case, problem: Problem) -> Result:
    q_factor = 1 / problem.options["kv_scale"].double()
    return oracle(problem._replace(softmax_scale=problem.softmax_scale * float(q_factor)))


@mutant(lambda c: c.q_dtype in FLOAT8 and _longest(c) > 1)
def q_without_its_scale(case: Case, problem: Problem) -> Result:
    return oracle(problem._replace(options={**problem.options, "q_scale": None}))


@mutant(lambda c: c.cache_dtype in FLOAT8)
def the_other_float8(case: Case, problem: Problem) -> Result:
    other = FNUZ if case.cache_dtype == FN else FN
    return oracle(problem._replace(kv_cache=problem.kv_cache.view(other)))


@mutant(lambda c: _longest(c) > c.page_size)
def table_off_by_one(case: Case, problem: Problem) -> Result:
    """Page i + 1 for page i, and the first again behind the last."""
    table = problem.block_table.clone()
    for b, length in enumerate(case.lengths):
        pages = -(-length // case.page_size)
        table[b, :pages] = table[b, :pages].roll(-1)
    return oracle(problem._replace(block_table=table))


@mutant(lambda c: _longest(c) % c.page_size > 0)
def started_page_dropped(case: Case, problem: Problem) -> Result:
    """Lengths rounded down to whole pages."""
    whole = problem.seq_lens // case.page_size * case.page_size
    return oracle(problem._replace(seq_lens=whole))


@mutant(lambda c: any(n % c.page_size for n in c.lengths))
def started_page_read_to_its_end(case: Case, problem: Problem) -> Result:
    """Lengths rounded up to whole pages: the rows behind are NaN."""
    whole = (problem.seq_lens + case.page_size - 1) // case.page_size * case.page_size
    return oracle(problem._replace(seq_lens=whole.int()))


@mutant(lambda c: c.rope > 0 and _longest(c) > 1)
def rope_ignored(case: Case, problem: Problem) -> Result:
    q = problem.q.clone()
    q[..., case.rank :] = 0
    return oracle(problem._replace(q=q))


@mutant(lambda c: c.rope > 0)
def values_taken_from_the_end(case: Case, problem: Problem) -> Result:
    """The last R numbers of a row instead of the first."""
    wide = {**problem.options, "kv_lora_rank": case.width}
    out, lse = oracle(problem._replace(options=wide))
    return out[..., case.rope :], lse


@mutant(lambda c: c.heads > 1 and _longest(c) > 1)
def neighbours_head(case: Case, problem: Problem) -> Result:
    out, lse = oracle(problem)
    return out.roll(1, 2), lse.roll(1, 2)


@mutant(lambda c: _longest(c) >= 2 * c.q_len)
def splits_averaged(case: Case, problem: Problem) -> Result:
    """Merged without their weights."""
    pieces = _pieces(problem, 2)
    lengths = torch.tensor(case.lengths)[:, None, None, None]
    mean = (pieces[0][0] + pieces[1][0]) / 2
    return torch.where(lengths >= 2 * case.q_len, mean, _merge(pieces)[0]), _merge(pieces)[1]


@mutant(lambda c: _longest(c) > 1)
def softmax_scale_2_percent_off(case: Case, problem: Problem) -> Result:
    return oracle(problem._replace(softmax_scale=problem.softmax_scale * 1.02))


@mutant(lambda c: _longest(c) > 1)
def weights_in_float8(case: Case, problem: Problem) -> Result:
    """P rounded to three bits, its sum not."""
    out, lse = oracle(problem)
    causal = problem.options["causal"]
    scales = problem.options["q_scale"], problem.options["kv_scale"]
    q, cache = (
        x.double() if scale is None else x.double() * scale.double()
        for x, scale in zip((problem.q, problem.kv_cache), scales, strict=True)
    )
    for b, length in enumerate(case.lengths):
        token = torch.arange(length)
        page = problem.block_table[b, token // case.page_size].long()
        rows = cache[page, token % case.page_size]
        for s in range(case.q_len):
            seen = rows[: max(0, length - case.q_len + 1 + s) if causal else length]
            if len(seen):
                weights = (problem.softmax_scale * q[b, s] @ seen.T).softmax(-1)
                top = weights.amax(-1, keepdim=True)
                rounded = (weights / top).to(FN).double() * top
                out[b, s] = rounded @ seen[:, : case.rank]
    return out, lse
