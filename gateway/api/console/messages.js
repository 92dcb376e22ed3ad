// What is sent of a conversation: the body of a request, the same as a command, and exports.

import { pathTo, shownTurns, titleOf } from "./conversations.js";
import { parseTools } from "./tools.js";
import { isTold } from "./turn.js";

const asking = ({ question: content, results }) =>
  results ? results.map(({ id, content: result }) => ({ role: "tool", tool_call_id: id, content: result }))
    : [{ role: "user", content }];

// Calls without results are left out: a conversation may not go on after them.
function answering({ text: content, calls }, areAnswered) {
  if (!areAnswered) return { role: "assistant", content };
  const tool_calls = calls.map(({ id, name, arguments: given }) =>
    ({ id, type: "function", function: { name, arguments: given } }));
  return { role: "assistant", content, tool_calls };
}

// The messages of the turns that have an answer, and of what `last` asks, if there is one.
function messagesOf(turns, last) {
  const told = turns.filter(isTold);
  const messages = told.flatMap((one, k) => {
    const next = told[k + 1] ?? last;
    return [...asking(one), answering(one, Boolean(next?.results))];
  });
  return last ? [...messages, ...asking(last)] : messages;
}

const system = (settings) => (settings?.system ? [{ role: "system", content: settings.system }] : []);

const SPECIAL = /[\\^$.*+?()[\]{}|]/g; // in a regular expression

// The fork that continues the answer of a turn behind `kept`. Text that is not the answer's own is demanded by a
// constraint; otherwise the fork begins at the nearest place before the end of `kept` at which a token is complete.
export function forkOf({ id, text, marks }, kept) {
  let same = 0;
  while (same < kept.length && kept[same] === text[same]) same += 1;
  const [, at] = marks.findLast(([length]) => length <= same) ?? [0, 0];
  const regex = same === kept.length ? null : `${kept.replace(SPECIAL, "\\$&")}[\\s\\S]*`;
  return { id, at, regex };
}

// Where the request of a turn is sent.
export const pathOf = ({ fork }) => (fork ? `/v1/streams/${fork.id}/fork?at=${fork.at}` : "/v1/chat/completions");

// The request of a turn.
export function bodyOf(conversation, turn) {
  const { model, temperature, max_tokens, seed, tools, receipt } = turn.settings;
  const messages = [...system(turn.settings), ...messagesOf(pathTo(conversation, turn.parent), turn)];
  const body = { model, messages, temperature, stream: true, stream_options: { include_usage: true }, detach: true };
  if (max_tokens !== null) body.max_tokens = max_tokens;
  if (seed !== null) body.seed = seed;
  if (receipt) body.receipt = true;
  const declared = parseTools(tools ?? "");
  if (declared.length) body.tools = declared;
  if (turn.fork?.regex) body.structured_outputs = { regex: turn.fork.regex };
  return body;
}

// The request as a command. The key is a variable of the shell, because commands are kept and shared.
export function curl(path, body) {
  const { detach, ...plain } = body;
  const quoted = JSON.stringify(plain, null, 2).replaceAll("'", "'\\''");
  return [
    `curl --no-buffer '${location.origin}${path}'`,
    "-H 'Content-Type: application/json'",
    '-H "Authorization: Bearer $OPENAI_API_KEY"',
    `-d '${quoted}'`,
  ].join(" \\\n  ");
}

// The branch that is shown as messages of the API, and all turns as the browser keeps them.
export function asJson(conversation) {
  const shown = shownTurns(conversation);
  const messages = [...system(shown.at(-1)?.settings), ...messagesOf(shown)];
  return JSON.stringify({ title: titleOf(conversation), messages, turns: conversation.turns }, null, 2);
}

// The branch that is shown, to be read.
export function asMarkdown(conversation) {
  const parts = [`# ${titleOf(conversation)}`];
  for (const { question, results, text, calls, settings } of shownTurns(conversation)) {
    parts.push("## Question", results ? results.map(({ name, content }) => `${name}: ${content}`).join("\n\n") : question);
    parts.push(`## Answer of ${settings.model}`, text);
    for (const call of calls) parts.push(`Calls \`${call.name}\`:`, `\`\`\`json\n${call.arguments}\n\`\`\``);
  }
  return `${parts.filter(Boolean).join("\n\n")}\n`;
}
