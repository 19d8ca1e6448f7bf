// Client of the server's API: models, sampling settings and streamed answers.

import { $, make } from "./dom.js";
import { saveSettings, settings } from "./store.js";

export class KeyNeeded extends Error {}

function headers() {
  const key = String(settings.key || "").trim();
  if (!/^[\x20-\x7e]*$/.test(key)) throw new Error("The API key in the settings contains invalid characters.");
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

async function call(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers() }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("The server cannot be reached.");
  });
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  const body = await response.json().catch(() => ({}));
  const wait = response.headers.get("Retry-After");
  const text = (body.error?.message || `The server sent status ${response.status}.`) + (wait ? ` Try again in ${wait} s.` : "");
  return response.status === 401 ? new KeyNeeded(text) : new Error(text);
}

// Events of a streamed answer. Throws an Error with a message to show; AbortError if stopped.
export async function* streamAnswer(path, body, signal) {
  const response = await call(path, { method: "POST", body: JSON.stringify(body), signal });
  try {
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  } catch (error) {
    throw error instanceof TypeError ? new Error("The connection was lost.") : error;
  }
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
}

// ---- models and sampling settings

export const server = { models: [], defaults: {}, suggestions: [] };

// Throws an Error if the server cannot be reached, KeyNeeded if it requires a key.
export async function loadModels() {
  const { data, defaults, suggestions } = await (await call("/v1/models")).json();
  Object.assign(server, { models: data, defaults, suggestions: suggestions || [] });
  $("model").replaceChildren(...data.map(({ id }) => make("option", { value: id, textContent: id })));
  showModel();
}

// Select the model from the settings, or the server's first one if it is not available.
export function showModel() {
  const known = server.models.some(({ id }) => id === settings.model);
  if (server.models.length) $("model").value = known ? settings.model : server.models[0].id;
}

export function chooseModel() {
  settings.model = $("model").value;
  saveSettings();
}

// Base models continue text; all others chat.
export function isBase(name = $("model").value) {
  return server.models.find(({ id }) => id === name)?.stage === "base";
}

function chosen(name) {
  const value = settings[name];
  return value === undefined || value === "" ? server.defaults[name] : Number(value);
}

export function samplingSettings() {
  const found = {};
  for (const name of ["temperature", "top_p", "top_k", "max_tokens"]) found[name] = chosen(name);
  if (settings.seed) found.seed = Math.trunc(Number(settings.seed));
  return found;
}
