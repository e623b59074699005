"""How much longer a grouped product takes where some experts get more tokens than others.

On one GPU all tokens are multiplied whichever expert they go to, but a group of few rows takes as long as one of more.
Of eleven real steps on an H200 (`studies.experts`), in which the fullest expert had 2.0 to 5.5 times the mean, the fp32
products are 3.5% off at the median and 7.5% at worst by this law, 6.2 and 10.8% if balanced: too long where a third or
more of the experts got no token, which no single number tells. Of several GPUs that divide the experts all wait for the
fullest, which multiplies more rows.
"""

from __future__ import annotations

from math import hypot, log

from flopcast.errors import UsageError
from flopcast.roofline.gpu.profile.passes import DEFAULT_SM_COUNT
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.gpu.profile.request import Estimate
from flopcast.roofline.stream.lowering.describe import Work
from flopcast.roofline.stream.lowering.grouped import (
    IMBALANCE,
    Groups,
    even_groups,
    is_group_by_group,
    is_grouped,
    products_of,
    seconds_in_one_kernel,
    uneven_groups,
)
from flopcast.roofline.stream.model.run import Run


def check_imbalance(works: list[Work], run: Run, ranks: int) -> None:
    """Raises UsageError where no expert can have so many tokens, or there are none: a token goes to as many experts as
    the grouped products have rows for it, and to each of these once."""
    grouped = [even_groups(work) for work in works if is_grouped(work.variant)]
    if not grouped:
        raise UsageError(
            f"imbalance {run.imbalance:g}: the step has no grouped products, by which experts are multiplied; leave it "
            "out"
        )
    tokens = run.batch * run.tokens_each
    most = min(max(1.0, tokens / one.rows) for one in grouped)
    if ranks > 1:
        most = min(most, ranks)
    if run.imbalance > most:
        whose = f"the fullest of {ranks} GPUs" if ranks > 1 else "the fullest expert"
        raise UsageError(
            f"imbalance is {run.imbalance:g}: {whose} has {most:g} times the mean at most, when all {tokens} tokens go "
            f"there; valid are 1 to {most:g}"
        )


def with_imbalance(
    work: Work, backend: str, cache: str, found: Estimate, profile: Profile, *, imbalance: float, ranks: int
) -> Estimate:
    """`found`: the estimate of the grouped product of even groups, than which uneven ones are never faster."""
    if imbalance == 1.0 or not is_grouped(work.variant):
        return found
    even = even_groups(work)
    uneven = uneven_groups(even, imbalance, ranks)

    def seconds(groups: list[Groups]) -> float:
        if not is_group_by_group(work.variant):
            return seconds_in_one_kernel(work, groups, profile.device.get("sm_count") or DEFAULT_SM_COUNT)
        products = products_of(work, groups)
        each = profile.estimate([(one, backend, cache) for one, _ in products])
        return sum(one.seconds * count for one, (_, count) in zip(each, products, strict=True))

    ratio = max(1.0, seconds(uneven) / seconds([even]))
    basis = "extrapolated"
    if is_group_by_group(work.variant) and found.basis in ("measured", "interpolated"):
        basis = "interpolated"
    return Estimate(
        found.seconds * ratio, hypot(found.sigma, IMBALANCE, log(ratio) * IMBALANCE), basis, f"{found.source}, uneven"
    )
