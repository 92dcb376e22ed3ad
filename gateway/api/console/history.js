// The list of conversations beside the chat.

import { allConversations, onOtherTabs, save, titleOf } from "./conversations.js";
import { $, ask, askForText, download, el } from "./dom.js";
import { asJson, asMarkdown } from "./messages.js";

// Shows the list, with what can be done to the conversation that is open. `actions` are
// { current(), open(conversation), remove(conversation) }.
export class History {
  constructor(actions) {
    this.actions = actions;
    onOtherTabs(() => this.show());
  }

  show() {
    const current = this.actions.current();
    const conversations = allConversations();
    $("#conversations").replaceChildren(...conversations.map((one) => this.#item(one, one.id === current.id)));
    $("#no-conversations").hidden = conversations.length > 0;
  }

  #item(conversation, isOpen) {
    const title = titleOf(conversation);
    const open = el("button", {
      type: "button", className: "title", title, textContent: title, onclick: () => this.actions.open(conversation),
    });
    if (isOpen) open.setAttribute("aria-current", "true");
    return el("li", {}, open, isOpen ? this.#tools(conversation) : null);
  }

  #tools(conversation) {
    const button = (textContent, onclick) =>
      el("button", { type: "button", className: "plain", textContent, "aria-label": `${textContent} this conversation`, onclick });
    return el("div", { className: "title-tools" },
      button("Rename", () => this.#rename(conversation)),
      button("Export", () => exportAs(conversation)),
      button("Delete", () => this.#remove(conversation)));
  }

  async #rename(conversation) {
    const title = await askForText("Rename this conversation", "Title", titleOf(conversation), "Rename");
    if (!title) return;
    conversation.title = title;
    save(conversation);
    this.show();
  }

  async #remove(conversation) {
    const answers = [{ label: "Delete", value: "delete", kind: "danger" }];
    if (await ask("Delete this conversation?", `“${titleOf(conversation)}” is removed from this browser for good.`, answers)) {
      this.actions.remove(conversation);
    }
  }
}

async function exportAs(conversation) {
  const answers = [{ label: "Markdown", value: "md", kind: "quiet" }, { label: "JSON", value: "json", kind: "strong" }];
  const form = await ask("Export this conversation",
    "Markdown is for readers. JSON has the messages in the form of the API, and all branches.", answers);
  if (!form) return;
  const name = titleOf(conversation).replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "conversation";
  if (form === "md") download(`${name}.md`, new Blob([asMarkdown(conversation)], { type: "text/markdown" }));
  else download(`${name}.json`, new Blob([asJson(conversation)], { type: "application/json" }));
}
