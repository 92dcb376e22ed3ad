// The checks of a client's program for Node, with one line of output for each: see checks.py.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

export const argument = process.argv.slice(2);
export const capital = "What is the capital of France?";
export const answer = "The capital of France is Paris.";
export const schema = {
  type: "object",
  properties: { city: { enum: ["Paris", "Rome"] }, unit: { enum: ["C", "F"] } },
  required: ["city", "unit"],
  additionalProperties: false,
};
export const asking = "The weather in Rome?";
// As in weather.py.
export const answering = 'Repeat: {"city": "Rome", "unit": "C"}';
export const calling = `Repeat: <tool_call>
{"name": "weather", "arguments": {"city": "Rome", "unit": "C"}}
</tool_call>`;

const installed = createRequire(`${process.cwd()}/`);

/** A package of the directory in which the program runs. */
export function imported(name) {
  return import(pathToFileURL(installed.resolve(name)));
}

export function isWeather({ city, unit }) {
  assert(schema.properties.city.enum.includes(city));
  assert(schema.properties.unit.enum.includes(unit));
}

/** Calls every check and prints whether it passed. An exception is a failure. */
export async function run(checks) {
  for (const [name, check] of Object.entries(checks)) {
    try {
      await check();
      console.log(JSON.stringify(["ok", name, ""]));
    } catch (error) {
      const reason = String(error).replace(/\s+/g, " ").slice(0, 600);
      console.log(JSON.stringify(["failed", name, reason]));
    }
  }
}
