from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.common.blockhash import HASH_BLOCK_TOKENS, ImageSpan, chain_root, extend_chain, wire_chain, wire_hash

token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=5 * HASH_BLOCK_TOKENS)


@given(token_ids)
def test_only_full_blocks_are_hashed(ids: list[int]) -> None:
    assert len(wire_chain("root", "", ids)) == len(ids) // HASH_BLOCK_TOKENS


@given(token_ids, token_ids)
def test_chains_share_exactly_their_common_blocks(one: list[int], other: list[int]) -> None:
    a, b = wire_chain("root", "", one), wire_chain("root", "", other)
    for n, (x, y) in enumerate(zip(a, b, strict=False), start=1):
        assert (x == y) == (one[: n * HASH_BLOCK_TOKENS] == other[: n * HASH_BLOCK_TOKENS])


@given(token_ids, st.integers(0, 5))
def test_a_chain_can_be_continued(ids: list[int], blocks: int) -> None:
    whole = extend_chain(chain_root("root"), ids)
    cut = min(blocks, len(whole))
    parent = whole[cut - 1] if cut else chain_root("root")
    assert extend_chain(parent, ids[cut * HASH_BLOCK_TOKENS :]) == whole[cut:]


def test_images_are_part_of_the_blocks_that_hold_their_tokens() -> None:
    ids, size = [7] * 6 * HASH_BLOCK_TOKENS, HASH_BLOCK_TOKENS
    plain = wire_chain("root", "", ids)
    for first, end, block in ((size, 3 * size, 1), (2 * size - 1, 2 * size, 1), (size // 2, 2 * size, 0), (5, 6, 0)):
        image = ImageSpan(first, end, b"a" * 32)
        chain = wire_chain("root", "", ids, [image])
        other = wire_chain("root", "", ids, [image._replace(digest=b"b" * 32)])
        for one, two in ((chain, other), (chain, plain)):
            assert [x == y for x, y in zip(one, two, strict=True)] == [number < block for number in range(6)]
        digests = extend_chain(chain_root("root"), ids, [image])
        for cut in range(1, 6):
            rest = extend_chain(digests[cut - 1], ids[cut * size :], [image], cut * size)
            assert rest == digests[cut:]


def test_models_and_tenants_have_disjoint_hashes() -> None:
    ids = list(range(HASH_BLOCK_TOKENS))
    chains = {tuple(wire_chain(*key, ids)) for key in (("a", ""), ("b", ""), ("a", "x"), ("a\0x", ""))}
    assert len(chains) == 4


def test_the_wire_hash_never_changes() -> None:
    assert wire_hash(bytes(range(32))) == 0x0706050403020100
    assert wire_chain("root", "salt", list(range(16))) == wire_chain("root", "salt", list(range(20)))
