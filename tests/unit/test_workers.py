"""Frames: what is sent arrives whole, or not at all."""

import io
import os

import pytest

from hiddenscope.workers import Channel, pack_frame, read_frame


def test_every_cut_of_a_frame_reads_as_the_end_of_the_stream() -> None:
    whole = pack_frame({"type": "result"}, b"bytes")
    for length in range(len(whole)):
        assert read_frame(io.BytesIO(whole[:length])) is None
    assert read_frame(io.BytesIO(whole)) == ({"type": "result"}, b"bytes")


def test_a_body_beyond_the_limit_is_refused_before_it_is_read() -> None:
    frame = pack_frame({}, b"12345")
    assert read_frame(io.BytesIO(frame), max_body=5) is not None
    with pytest.raises(ValueError, match="too large"):
        read_frame(io.BytesIO(frame), max_body=4)


def test_a_channel_ends_when_the_other_side_has_ended() -> None:
    theirs, ours = os.pipe()
    incoming = io.BytesIO(pack_frame({"answer": 1}, b"body"))
    channel = Channel(incoming, os.fdopen(ours, "wb"), max_body=4)
    channel.send({"number": 1}, b"body")
    with os.fdopen(theirs, "rb") as other:
        assert read_frame(other) == ({"number": 1}, b"body")
        assert channel.receive() == ({"answer": 1}, b"body")
        assert channel.receive() is None
    with pytest.raises(BrokenPipeError):
        channel.send({"number": 2})
    channel.close()
    channel.close_outgoing()
    assert incoming.closed
