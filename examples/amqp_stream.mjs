// Stream an answer over AMQP, and keep reading when its worker dies.
//
// Usage: npm ci && node amqp_stream.mjs BROKER_URL QUESTION [MODEL]

import { randomUUID } from "node:crypto";
import { decode, encode } from "@msgpack/msgpack";
import amqp from "amqplib";

const [url, question, model = "smollm2"] = process.argv.slice(2);
const userId = decodeURIComponent(new URL(url).username);
const requestId = `${userId}.example-${randomUUID()}`; // names of other users are refused
const queue = `reply.${requestId}`;

// The state of the log's only choice.
const tokenIds = [];
let prefixHash = 0xcbf29ce484222325n; // FNV-1a over whole token ids, 64 bits
let numerics = ""; // of the worker that generated the last token
let attempt = 0;
let run = null; // the `started` event of the current attempt
const replaced = new Set();
const handedOver = new Set();
const productive = new Set(); // runs that generated tokens
const MAX_EXCUSED = 6; // of these, if they were lost: not counted as crashes

const connection = await amqp.connect(url);
const events = await connection.createChannel();
const jobs = await connection.createConfirmChannel();

// A later delivery of a job compares greater.
function compare(a, b) {
  return a.publication - b.publication || a.is_alone - b.is_alone || a.num_returns - b.num_returns;
}

// Sends a command to the worker that wrote `started`.
function command(started, fields) {
  const body = encode({ request_id: requestId, ticket: started.ticket, ...fields });
  events.publish("warren.control", started.worker, Buffer.from(body), { userId });
}

function start(started) {
  if (started.ticket !== run?.ticket) {
    const order = run === null ? 1 : compare(started, run);
    if (order <= 0) {
      // From a worker that no longer has the job.
      command(started, { type: "cancel", is_replaced: order === 0 });
      return;
    }
    if (run !== null) {
      command(run, { type: "cancel", is_replaced: true });
      replaced.add(run.ticket);
    }
    attempt = Math.max(attempt, Number(started.is_waiting)) + 1;
    run = started;
  }
  if (attempt > 1) {
    const lost = [...replaced].filter((ticket) => !handedOver.has(ticket));
    const numExcused = lost.filter((ticket) => productive.has(ticket)).length;
    const numCrashes = lost.length - Math.min(numExcused, MAX_EXCUSED);
    command(started, {
      type: "continue", attempt, numerics, num_crashes: numCrashes,
      choices: [{ token_ids: tokenIds, is_finished: false }],
    });
  }
}

// Whether an event continues exactly the tokens that were read.
function isNext(event) {
  return event.attempt === attempt && event.index === tokenIds.length
    && BigInt(event.prefix_hash) === prefixHash;
}

function isFailure(event) {
  if (event.ticket !== null) return event.ticket === run?.ticket;
  return (event.attempt === 0 && tokenIds.length === 0) || isNext(event);
}

// Prints what counts. Returns whether the log has ended.
function read(event) {
  if (event.type === "started") start(event);
  if (event.type === "handed_over") handedOver.add(event.ticket);
  if (event.type === "failed" && isFailure(event)) throw new Error(`${event.code}: ${event.message}`);
  if (!["token_delta", "finished"].includes(event.type) || !isNext(event)) return false;
  numerics = run.numerics;
  productive.add(run.ticket);
  for (const tokenId of event.token_ids) {
    tokenIds.push(tokenId);
    prefixHash = BigInt.asUintN(64, (prefixHash ^ BigInt(tokenId)) * 0x100000001b3n);
  }
  process.stdout.write(event.text);
  return event.type === "finished";
}

await events.assertQueue(queue, { durable: true, arguments: { "x-expires": 600_000 } });
await events.bindQueue(queue, "warren.replies", queue);
const ended = new Promise((resolve, reject) => {
  const onMessage = (message) => {
    try {
      // The hash has 64 bits, which only a BigInt holds.
      if (read(decode(message.content, { useBigInt64: true }))) resolve();
    } catch (error) {
      reject(error);
    }
  };
  // Exclusive and never acknowledged: the queue keeps the whole log for the next reader.
  events.consume(queue, onMessage, { exclusive: true }).catch(reject);
});
jobs.on("return", () => {
  console.error(`no worker has ever served ${model}`);
  process.exit(1);
});
const job = {
  type: "generation_job", request_id: requestId, model, mode: "stream",
  prompts: [{ type: "chat", messages: [{ role: "user", content: question }] }],
  sampling: { max_tokens: 64, temperature: 0.7, seed: 17 },
};
jobs.publish("warren.jobs", `${model}.interactive`, Buffer.from(encode(job)), {
  contentType: "application/msgpack", persistent: true, mandatory: true,
  correlationId: requestId, replyTo: queue, userId,
});
await jobs.waitForConfirms();
await ended;
await events.deleteQueue(queue);
await connection.close();
console.log();
