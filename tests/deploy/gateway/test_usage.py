"""Only the bytes of the number change, wherever an engine writes it."""

import json

import pytest

from deploy.gateway.proxy.usage import in_answer, in_events, replaced

USAGE = '{"prompt_tokens":300,"total_tokens":304,"completion_tokens":4,"prompt_tokens_details":%s}'


def answer(details: str, text: str = "x") -> bytes:
    usage = USAGE % details
    choices = json.dumps([{"index": 0, "text": text}])
    return f'{{"id":"c","choices":{choices},"usage":{usage},"kv_transfer_params":null}}'.encode()


@pytest.mark.parametrize("number", [0, 7, 12345])
def test_the_number_of_a_whole_answer_is_replaced_and_nothing_else(number: int) -> None:
    before = answer('{"cached_tokens":299,"created_cache_tokens":1}')
    (place,) = in_answer(before)
    assert place.num_tokens == 299
    wanted = before.replace(b'"cached_tokens":299', b'"cached_tokens":%d' % number)
    assert replaced(before, [place], number) == wanted


@pytest.mark.parametrize(
    "details",
    [
        '{"cached_tokens": 299}',
        '{ "audio_tokens" : 1 , "cached_tokens" : 299 , "x" : null }',
        '{"multimodal_tokens":{"cached_tokens":5},"cached_tokens":299}',
        '{\n  "cached_tokens":\t299\n}',
    ],
)
def test_spaces_and_neighbours_stay(details: str) -> None:
    before = answer(details)
    (place,) = in_answer(before)
    assert replaced(before, [place], 3) == answer(details.replace("299", "3"))


@pytest.mark.parametrize(
    "text",
    [
        '"usage":{"prompt_tokens_details":{"cached_tokens":299}}',
        '\\"cached_tokens\\":299',
        '{"usage": ' + USAGE % '{"cached_tokens":299}' + "}",
    ],
)
def test_what_a_model_writes_about_usage_stays(text: str) -> None:
    before = answer('{"cached_tokens":299}', text)
    (place,) = in_answer(before)
    after = replaced(before, [place], 3)
    assert json.loads(after)["choices"] == json.loads(before)["choices"]
    assert json.loads(after)["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


@pytest.mark.parametrize(
    "body",
    [
        answer("null"),
        answer("{}"),
        answer('{"cached_tokens":null}'),
        answer('{"cached_tokens":"299"}'),
        answer('{"cached_tokens":-1}'),
        answer('{"cached_tokens":2.5}'),
        answer('[{"cached_tokens":1}]'),
        b'{"choices":[{"top_logprobs":{"cached_tokens":299}}],"usage":{"prompt_tokens":3}}',
        b'{"usage":{"prompt_tokens_details":{"cached_tokens":299}',
        b'{"cached_tokens":299}',
        b'"cached_tokens"',
        b"",
    ],
)
def test_answers_without_the_number_have_no_place_for_it(body: bytes) -> None:
    assert in_answer(body) == []
    assert in_events(b"data: " + body + b"\n\n") == []
    assert replaced(body, [], 3) == body


@pytest.mark.parametrize("newline", [b"\n\n", b"\r\n\r\n"])
@pytest.mark.parametrize("space", [b"", b" "])
def test_numbers_of_events_are_replaced(newline: bytes, space: bytes) -> None:
    def events(number: int) -> bytes:
        chunks = [
            b'{"choices":[{"text":"a\\"cached_tokens\\":299"}],"usage":null}',
            answer(f'{{"cached_tokens":{number}}}'),
            b'{"choices":[{"text":"b"}]}',
            answer(f'{{"cached_tokens":{number}}}', "later"),
        ]
        data = b"".join(b"data:" + space + chunk + newline for chunk in chunks)
        return b": ping" + newline + data + b"data:" + space + b"[DONE]" + newline

    before = events(299)
    places = in_events(before)
    assert [place.num_tokens for place in places] == [299, 299]
    assert replaced(before, places, 1000) == events(1000)


def test_chunks_without_usage_are_passed_over_unread() -> None:
    broken = b"data: {not json\n\n"
    assert in_events(broken) == []


def test_the_number_of_a_response_is_found_too() -> None:
    details = {"cached_tokens": 299, "cached_tokens_per_turn": [299]}
    usage = {"input_tokens": 300, "input_tokens_details": details, "output_tokens": 2}
    whole = {"id": "r", "output": [{"text": "cached_tokens"}], "usage": usage, "user": None}
    body = json.dumps(whole).encode()
    (place,) = in_answer(body)
    wanted = body.replace(b'"cached_tokens": 299', b'"cached_tokens": 0')
    assert replaced(body, [place], 0) == wanted
    data = json.dumps({"type": "response.completed", "response": whole}).encode()
    event = b"event: response.completed\ndata: " + data + b"\n\n"
    (place,) = in_events(event)
    assert replaced(event, [place], 0).count(b'"cached_tokens": 0') == 1
