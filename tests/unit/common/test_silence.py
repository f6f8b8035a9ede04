from __future__ import annotations

from services.common.silence import TICK_S, Silence


def test_silence_is_counted_only_while_a_message_was_possible() -> None:
    silence = Silence(1.0)
    assert not silence.too_long(100.0, heard=False)
    assert not silence.too_long(200.0, heard=False), "our own event loop stood still: the messages are still unread"
    now, ticks = 200.0, 0
    while not silence.too_long(now := now + TICK_S, heard=False):
        ticks += 1
    assert 1 <= ticks <= 4
    silence = Silence(1.0)
    assert not any(silence.too_long(t * TICK_S, heard=t % 4 == 0) for t in range(100)), "it speaks now and then"
