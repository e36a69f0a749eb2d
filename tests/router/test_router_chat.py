"""Chat and completions through real sockets: what clients read, streamed and whole."""

from __future__ import annotations

from router_fakes import TOKENIZER, chat_ids, chat_request, cluster, completion_request, in_loop


@in_loop
async def test_a_chat_travels_prefill_then_decode():
    async with cluster() as c:
        status, answer = await c.chat()
        assert status == 200, answer
        choice = answer["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": "Hello there."}
        assert choice["finish_reason"] == "stop"
        usage = answer["usage"]
        assert usage["completion_tokens"] == len(c.model.reply)
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        prefill, decode = c.workers["prefill-0"], c.workers["decode-0"]
        assert [name for name, _ in prefill.calls] == ["Prefill"]
        assert [name for name, _ in decode.calls] == ["Reserve", "Adopt"]
        await c.idle()
