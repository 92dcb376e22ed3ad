// The stream of an answer. Its turn is saved with the answer so far and the id of the last event together, so
// that both always fit: after a reload, or when the connection breaks, the stream is resumed from there.

import { ApiError, events, postJson, request } from "./api.js";
import { save } from "./conversations.js";
import { speak } from "./dom.js";
import { bodyOf, pathOf } from "./messages.js";
import { isRunning } from "./turn.js";

const SAVE_MS = 400;
const FIRST_PAUSE_MS = 300;
const LONGEST_PAUSE_MS = 5000;
const PASSING = new Set(["unreachable", "service_unavailable", "broker_unavailable", "rate_limit_exceeded"]);
const PLACE = /^(\d+)\.\d+$/; // the id of an event after which so many tokens are complete
const ELSEWHERE = "Another tab reads this answer now.";

export class Exchange {
  // `onWrite` is given what writes to the view; `onEnd` is called when the turn has ended.
  constructor(conversation, view, { onWrite, onEnd }) {
    this.conversation = conversation;
    this.view = view;
    this.turn = view.turn;
    this.onWrite = onWrite;
    this.onEnd = onEnd;
    this.savedAt = -Infinity;
  }

  save() {
    this.savedAt = performance.now();
    save(this.conversation);
  }

  // Follows the stream to its end, through lost connections.
  async follow() {
    const { turn, view } = this;
    let pauseMs = FIRST_PAUSE_MS;
    while (isRunning(turn)) {
      try {
        const response = await this.#open();
        if (!isRunning(turn)) return void discard(turn); // stopped before its id was known
        if (response.status === 204) return this.end("done");
        this.save();
        view.update();
        pauseMs = FIRST_PAUSE_MS;
        if (await this.#readAll(response)) return;
      } catch (error) {
        if (!isRunning(turn)) return;
        if (!PASSING.has(error.code)) return this.#fail(error);
        pauseMs = Math.max(pauseMs, error.retryAfterMs);
      }
      view.update("Reconnecting …");
      await new Promise((resolve) => setTimeout(resolve, pauseMs));
      pauseMs = Math.min(2 * pauseMs, LONGEST_PAUSE_MS);
    }
  }

  // Sends the question, or goes on after the last event. A question that was sent and whose answer's id is
  // not known yet is sent again: its Idempotency-Key leads to the same answer.
  async #open() {
    const { turn } = this;
    if (turn.id !== null) {
      const place = turn.place === "" ? {} : { "Last-Event-ID": turn.place };
      return request(`/v1/streams/${turn.id}`, { headers: { Accept: "text/event-stream", ...place } });
    }
    const headers = { Accept: "text/event-stream", "Idempotency-Key": turn.key };
    const response = await postJson(pathOf(turn), bodyOf(this.conversation, turn), { headers });
    turn.id = response.headers.get("x-request-id");
    return response;
  }

  // Reads events until the end of the answer; returns false if the connection ended before.
  async #readAll(response) {
    const { turn } = this;
    for await (const event of events(response)) {
      if (!isRunning(turn)) return true;
      let isEnded = false;
      this.onWrite(() => { isEnded = this.#take(event); });
      if (isEnded) return true;
      if (event.id !== undefined) this.#note(event.id);
      if (performance.now() - this.savedAt > SAVE_MS) this.save();
    }
    return false;
  }

  // Notes how far the answer has come, and how many tokens its text has: a fork begins there.
  #note(id) {
    const { turn } = this;
    turn.place = id;
    const tokens = PLACE.exec(id);
    const { length } = turn.text;
    if (tokens && length > (turn.marks.at(-1)?.[0] ?? 0)) turn.marks.push([length, Number(tokens[1])]);
  }

  #take(event) {
    if (event.comment?.startsWith("continued ")) {
      this.view.move(JSON.parse(event.comment.slice("continued ".length)));
      this.view.update();
    }
    if (event.data === "[DONE]") {
      this.end("done");
      return true;
    }
    if (event.data !== undefined) this.#read(JSON.parse(event.data));
    return false;
  }

  #read(chunk) {
    const { turn, view } = this;
    if (chunk.error) throw new ApiError(0, chunk.error.code, chunk.error.message, 0);
    turn.usage = chunk.usage ?? turn.usage;
    turn.receipt = chunk.receipt ?? turn.receipt;
    const choice = chunk.choices[0];
    if (!choice) return;
    turn.finish = choice.finish_reason ?? turn.finish;
    const { content, reasoning_content: thought, tool_calls: pieces } = choice.delta;
    if (thought) view.think(thought);
    if (content) {
      turn.firstAt ??= Date.now();
      view.append(content);
    }
    if (pieces) view.call(pieces);
    if (content || thought || pieces) view.update();
  }

  // Ends the turn: "done", "stopped" or "failed".
  end(how) {
    const { turn } = this;
    turn.state = how;
    if (turn.firstAt && how === "done") turn.seconds = (Date.now() - turn.firstAt) / 1000;
    this.save();
    this.view.update();
    if (turn.calls.length && how === "done") speak(`The model calls ${turn.calls.map(({ name }) => name).join(", ")}.`);
    if (how !== "done" && turn.error !== ELSEWHERE) discard(turn);
    this.onEnd();
  }

  #fail(error) {
    const words = { stream_expired: "The gateway no longer keeps this answer.", taken_over: ELSEWHERE };
    this.turn.error = words[error.code] ?? error.message;
    this.end("failed");
  }
}

// The answer is not wanted: its stream need not be kept any longer.
export function discard({ id }) {
  if (id !== null) request(`/v1/streams/${id}`, { method: "DELETE", keepalive: true }).catch(() => {});
}
