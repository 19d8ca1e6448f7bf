// Exports and imports chats.
//
//   JSON   {"format": "nanochat-chats", "version": 1, "chats": [...]}: complete, all versions
//   JSONL  one chat per line, a list of {"role", "content"} for tasks/chats.py: shown version only

import { addMessage, asMessages, checkedChat, newChat, pathTo, textPart } from "./chat.js";

const FORMAT = "nanochat-chats";

export function toJson(list) {
  return `${JSON.stringify({ format: FORMAT, version: 1, chats: list })}\n`;
}

// Chats without an answer are omitted.
export function toJsonl(list) {
  return list.map(lineOf).filter(Boolean).map((line) => `${line}\n`).join("");
}

function lineOf(chat) {
  const path = pathTo(chat, chat.head.id), messages = asMessages(path);
  if (!messages.some((message) => message.role === "assistant")) return "";
  while (messages.at(-1).role === "user") messages.pop();
  const system = path.findLast((node) => node.system)?.system || chat.system;
  return JSON.stringify(system ? [{ role: "system", content: system }, ...messages] : messages);
}

// File name derived from a chat's title.
export function fileName(title, extension) {
  const plain = title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40).replace(/^-|-$/g, "");
  return `${plain || "chat"}.${extension}`;
}

// Parse a file of either format into chats. Throws an Error that describes the problem.
export function readChats(text) {
  const whole = parse(text);
  if (whole?.format === FORMAT) {
    if (whole.version !== 1 || !Array.isArray(whole.chats)) throw new Error(`unknown format version ${whole.version}`);
    return whole.chats.map((value, i) => {
      const chat = checkedChat(value);
      if (!chat) throw new Error(`chat ${i + 1} is damaged`);
      return chat;
    });
  }
  if (whole && isConversation(whole)) return [fromMessages(whole, "")]; // pretty-printed
  const lines = text.split("\n").filter((line) => line.trim());
  if (!lines.length) throw new Error("the file is empty");
  return lines.map((line, i) => fromMessages(parse(line), `line ${i + 1}: `));
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    return null;
  }
}

const isConversation = (value) => Array.isArray(value?.messages ?? value);

function fromMessages(value, where) {
  const messages = value?.messages ?? value, chat = newChat();
  if (!Array.isArray(messages) || !messages.length) throw new Error(`${where}not a list of messages`);
  const system = [];
  let parent = null;
  for (const message of messages) {
    const content = message?.content;
    const parts = typeof content === "string" ? [textPart(content)] : content;
    if (message?.role === "system") {
      if (!isText(parts)) throw new Error(`${where}a system message must be text`);
      system.push(parts.map((part) => part.text).join(""));
    } else {
      const more = message?.role === "assistant" ? { finish: "stop" } : {};
      parent = addMessage(chat, parent, message?.role, parts, more).id;
    }
  }
  chat.system = system.join("\n\n"); // as in training
  Object.values(chat.nodes).forEach((node, i) => { node.created += i; });
  const checked = checkedChat(chat);
  if (!checked || !parent) throw new Error(`${where}not a list of messages with role and content`);
  return checked;
}

const isText = (parts) => Array.isArray(parts) && parts.every((part) => part?.type === "text" && typeof part.text === "string");
