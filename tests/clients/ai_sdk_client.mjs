// Vercel's AI SDK with its provider for servers with OpenAI's API: URL KEY MODEL.

import assert from "node:assert/strict";
import { answer, answering, argument, asking, calling, capital, imported, isWeather, run, schema } from "./checks.mjs";

const { generateText, streamText, jsonSchema, Output, stepCountIs, tool } = await imported("ai");
const { createOpenAICompatible } = await imported("@ai-sdk/openai-compatible");

const [url, apiKey, name] = argument;
const warren = createOpenAICompatible({
  name: "warren", baseURL: `${url}/v1`, apiKey, includeUsage: true, supportsStructuredOutputs: true,
});
const common = { model: warren(name), temperature: 0, maxOutputTokens: 48, maxRetries: 0 };
const output = Output.object({ schema: jsonSchema(schema) });

function weather(called) {
  return tool({
    description: "Tell the weather.",
    inputSchema: jsonSchema(schema),
    execute: async (given) => (called.push(given), "It is sunny in Rome."),
  });
}

async function oneCall(ask) {
  const called = [];
  const result = await ask({ weather: weather(called) });
  assert.deepEqual(called, [{ city: "Rome", unit: "C" }]);
  return result;
}

await run({
  async "chat"() {
    const { text, usage, finishReason } = await generateText({ ...common, prompt: capital });
    assert.deepEqual([text, usage.outputTokens, finishReason], [answer, 8, "stop"]);
  },
  async "chat streamed"() {
    const { textStream, usage } = streamText({ ...common, prompt: capital });
    const pieces = [];
    for await (const piece of textStream) pieces.push(piece);
    assert.equal(pieces.join(""), answer);
    assert(pieces.length > 3);
    assert.equal((await usage).outputTokens, 8);
  },
  async "agent calls a tool"() {
    const { text } = await oneCall((tools) =>
      generateText({ ...common, prompt: calling, tools, stopWhen: stepCountIs(2) }));
    assert.match(text, /sunny/i);
  },
  async "agent calls a tool, streamed"() {
    const text = await oneCall((tools) =>
      streamText({ ...common, prompt: calling, tools, stopWhen: stepCountIs(2) }).text);
    assert.match(text, /sunny/i);
  },
  async "structured output"() {
    isWeather((await generateText({ ...common, prompt: asking, output })).output);
  },
  async "agent with a tool answers by a schema"() {
    const tools = { weather: weather([]) };
    isWeather((await generateText({ ...common, prompt: answering, tools, output })).output);
  },
  async "agent with a schema calls a tool"() {
    await oneCall((tools) => generateText({ ...common, prompt: calling, tools, output }));
  },
});
