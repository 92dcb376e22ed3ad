// The official client for Node. Run in a directory where it is installed: URL KEY MODEL.

import assert from "node:assert/strict";
import { answer as ANSWER, argument, asking as question, capital, imported, isWeather, run, schema } from "./checks.mjs";

const { default: OpenAI, toFile } = await imported("openai");

const [url, apiKey, model] = argument;
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: capital }];
const asking = [{ role: "user", content: question }];
const tools = [{ type: "function", function: { name: "weather", parameters: schema } }];

function batchLines(content, more = {}) {
  const body = { model, messages: [{ role: "user", content }], temperature: 0, ...more };
  const line = (custom_id) => ({ custom_id, method: "POST", url: "/v1/chat/completions", body });
  return Buffer.from(["1", "2"].map((id) => `${JSON.stringify(line(id))}\n`).join(""));
}

async function startBatch(input_file_id) {
  return client.batches.create({ input_file_id, endpoint: "/v1/chat/completions", completion_window: "24h" });
}

async function endOf(batch) {
  while (["validating", "in_progress", "finalizing", "cancelling"].includes(batch.status)) {
    await new Promise((wake) => setTimeout(wake, 200));
    batch = await client.batches.retrieve(batch.id);
  }
  return batch;
}

await run({
  async "chat"() {
    const answer = await client.chat.completions.create({ model, messages, temperature: 0 });
    assert.equal(answer.choices[0].message.content, ANSWER);
    assert.equal(answer.usage.completion_tokens, 8);
    assert.match(answer._request_id, /^[a-z]+-[0-9a-f]{32}$/);
  },
  async "chat streamed"() {
    const stream = await client.chat.completions.create({
      model, messages, temperature: 0, stream: true, stream_options: { include_usage: true },
    });
    let text = "", usage = null;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, ANSWER);
    assert.equal(usage.completion_tokens, 8);
  },
  async "chat streamed by the helper"() {
    const stream = client.chat.completions.stream({ model, messages, temperature: 0 });
    let text = "";
    stream.on("content", (piece) => { text += piece; });
    assert.equal(await stream.finalContent(), ANSWER);
    assert.equal(text, ANSWER);
  },
  async "a stream left early frees the client"() {
    const stream = await client.chat.completions.create({
      model, messages, stream: true, max_tokens: 2000, ignore_eos: true,
    });
    for await (const chunk of stream) if (chunk.choices[0].delta.content) break;
    assert(stream.controller.signal.aborted);
  },
  async "completions, streamed and not"() {
    const request = { model, prompt: "Once upon a time", max_tokens: 8, temperature: 0 };
    const whole = await client.completions.create(request);
    let text = "";
    for await (const chunk of await client.completions.create({ ...request, stream: true }))
      text += chunk.choices[0].text;
    assert.equal(text, whole.choices[0].text);
  },
  async "tool call required"() {
    const answer = await client.chat.completions.create({
      model, messages: asking, tools, tool_choice: "required", temperature: 0, parallel_tool_calls: false,
    });
    assert.equal(answer.choices[0].finish_reason, "tool_calls");
    isWeather(JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments));
  },
  async "tool call streamed by the helper"() {
    const final = await client.chat.completions.stream({
      model, messages: asking, tools, temperature: 0,
      tool_choice: { type: "function", function: { name: "weather" } },
    }).finalMessage();
    isWeather(JSON.parse(final.tool_calls[0].function.arguments));
  },
  async "tools run by the helper"() {
    const called = [];
    const weather = (given) => (called.push(given), "sunny, 25");
    const runner = client.chat.completions.runTools({
      model, messages: asking, temperature: 0, tool_choice: {
        type: "function", function: { name: "weather" },
      },
      tools: [{ type: "function", function: { ...tools[0].function, function: weather } }],
    });
    await runner.done();
    assert.equal(called.length, 1);
    isWeather(JSON.parse(called[0]));
  },
  async "parsed answer"() {
    const answer = await client.chat.completions.parse({
      model, messages: asking, temperature: 0, response_format: {
        type: "json_schema", json_schema: { name: "weather", strict: true, schema },
      },
    });
    isWeather(answer.choices[0].message.parsed);
  },
  async "response"() {
    const answer = await client.responses.create({ model, input: messages[0].content, temperature: 0 });
    assert.equal(answer.output_text, ANSWER);
  },
  async "response streamed by the helper"() {
    const stream = client.responses.stream({ model, input: messages[0].content, temperature: 0 });
    const kinds = new Set();
    for await (const event of stream) kinds.add(event.type);
    assert.equal((await stream.finalResponse()).output_text, ANSWER);
    assert(kinds.has("response.output_text.delta"));
  },
  async "response in the background"() {
    const request = { model, input: messages[0].content, temperature: 0 };
    const { id } = await client.responses.create({ ...request, background: true, store: true });
    let last = null;
    for await (const event of await client.responses.retrieve(id, { stream: true })) last = event;
    assert.equal(last.type, "response.completed");
    assert.equal((await client.responses.retrieve(id)).output_text, ANSWER);
  },
  async "batch"() {
    const file = await client.files.create({
      file: await toFile(batchLines(messages[0].content), "in.jsonl"), purpose: "batch",
    });
    const batch = await endOf(await startBatch(file.id));
    assert.equal(batch.status, "completed");
    assert.deepEqual(batch.request_counts, { total: 2, completed: 2, failed: 0 });
    const text = await (await client.files.content(batch.output_file_id)).text();
    const answers = text.trim().split("\n").map((line) => JSON.parse(line));
    assert.deepEqual(answers.map((answer) => answer.custom_id), ["1", "2"]);
    for (const { response } of answers) assert.equal(response.body.choices[0].message.content, ANSWER);
    const listed = [];
    for await (const one of client.batches.list({ limit: 1 })) listed.push(one.id);
    assert(listed.includes(batch.id));
  },
  async "batch of a file that was uploaded in parts, cancelled"() {
    const content = batchLines("Tell me a long story.", { max_tokens: 2000, ignore_eos: true });
    const upload = await client.uploads.create({
      bytes: content.length, filename: "in.jsonl", mime_type: "application/jsonl", purpose: "batch",
    });
    const halves = [content.subarray(0, 100), content.subarray(100)];
    const parts = await Promise.all(halves.map(async (half) =>
      client.uploads.parts.create(upload.id, { data: await toFile(half, "part") })));
    const { status, file } = await client.uploads.complete(upload.id, { part_ids: parts.map(({ id }) => id) });
    assert.equal(status, "completed");
    const batch = await startBatch(file.id);
    await client.batches.cancel(batch.id);
    assert.equal((await endOf({ ...batch, status: "cancelling" })).status, "cancelled");
    assert((await client.files.delete(file.id)).deleted);
  },
  async "models"() {
    const found = [];
    for await (const one of client.models.list()) found.push(one.id);
    assert(found.includes(model));
    assert.equal((await client.models.retrieve(model)).id, model);
  },
  async "errors by class"() {
    const ask = (more) => client.chat.completions.create({ model, messages, ...more });
    await assert.rejects(ask({ temperature: 3 }), OpenAI.BadRequestError);
    await assert.rejects(ask({ model: "gpt-5" }), OpenAI.NotFoundError);
    const wrong = new OpenAI({ baseURL: `${url}/v1`, apiKey: "wrong", maxRetries: 0 });
    await assert.rejects(wrong.models.list(), OpenAI.AuthenticationError);
  },
});
