// Anthropic's official client for Node. Run in a directory where it is installed: URL KEY MODEL.

import assert from "node:assert/strict";
import { answer as ANSWER, argument, asking, capital, imported, isWeather, run, schema } from "./checks.mjs";

const { default: Anthropic } = await imported("@anthropic-ai/sdk");

const [url, apiKey, model] = argument;
const client = new Anthropic({ baseURL: url, apiKey, maxRetries: 0 });
const ask = {
  model, max_tokens: 32, temperature: 0,
  messages: [{ role: "user", content: capital }],
};
const withTool = {
  ...ask, max_tokens: 128,
  messages: [{ role: "user", content: asking }],
  tools: [{ name: "weather", input_schema: schema }],
  tool_choice: { type: "any", disable_parallel_tool_use: true },
};

await run({
  async "message"() {
    const message = await client.messages.create(ask);
    assert.equal(message.content[0].text, ANSWER);
    assert.equal(message.stop_reason, "end_turn");
    assert.equal(message._request_id, message.id);
  },
  async "message streamed"() {
    const kinds = [];
    let text = "";
    for await (const event of await client.messages.create({ ...ask, stream: true })) {
      kinds.push(event.type);
      if (event.type === "content_block_delta") text += event.delta.text;
    }
    assert.equal(text, ANSWER);
    assert.deepEqual([kinds[0], kinds.at(-1)], ["message_start", "message_stop"]);
  },
  async "message streamed by the helper"() {
    const stream = client.messages.stream(ask);
    let text = "";
    stream.on("text", (piece) => { text += piece; });
    assert.equal(await stream.finalText(), ANSWER);
    assert.equal(text, ANSWER);
  },
  async "tool call"() {
    const message = await client.messages.create(withTool);
    assert.equal(message.stop_reason, "tool_use");
    isWeather(message.content[0].input);
  },
  async "tool call streamed by the helper"() {
    const message = await client.messages.stream(withTool).finalMessage();
    assert.equal(message.stop_reason, "tool_use");
    isWeather(message.content[0].input);
  },
  async "tokens are counted"() {
    const { input_tokens: count } = await client.messages.countTokens({ model, messages: ask.messages });
    const { usage } = await client.messages.create(ask);
    assert.equal(count, usage.input_tokens + usage.cache_read_input_tokens);
  },
  async "a stream left early frees the client"() {
    const stream = await client.messages.create({ ...ask, max_tokens: 2000, stream: true });
    for await (const event of stream) if (event.type === "content_block_delta") break;
    assert(stream.controller.signal.aborted);
  },
  async "errors"() {
    await assert.rejects(client.messages.create({ ...ask, model: "claude" }), Anthropic.NotFoundError);
    const wrong = new Anthropic({ baseURL: url, apiKey: "wrong", maxRetries: 0 });
    await assert.rejects(wrong.messages.create(ask), Anthropic.AuthenticationError);
  },
});
