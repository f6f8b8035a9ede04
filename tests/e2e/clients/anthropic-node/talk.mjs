// @anthropic-ai/sdk: text, streams, a tool with its way back, structured output, counted tokens, errors.

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "unused", maxRetries: 0 });
const messages = [{ role: "user", content: "How warm is it in Rome?" }];
const common = { model: "ryzanstein-tiny", messages, max_tokens: 20, top_k: 1, system: "Be brief." };
const schema = {
  type: "object",
  properties: { city: { type: "string", maxLength: 12 }, unit: { enum: ["C", "F"] } },
  required: ["city", "unit"],
  additionalProperties: false,
};

// text, whole and streamed
const whole = await client.messages.create(common);
const stream = client.messages.stream(common);
let text = "";
stream.on("text", (piece) => (text += piece));
const final = await stream.finalMessage();
assert.equal(text, whole.content.map((block) => block.text).join(""));
assert.deepEqual(final.usage, whole.usage);
const { max_tokens, top_k, ...counted } = common;
assert.equal((await client.messages.countTokens(counted)).input_tokens, whole.usage.input_tokens);

// a tool, whole and streamed, and the way back
const tools = [{ name: "get_weather", description: "How warm it is in a city", input_schema: schema }];
const asked = { ...common, max_tokens: 400, tools, tool_choice: { type: "tool", name: "get_weather" } };
const called = await client.messages.create(asked);
const call = called.content.find((block) => block.type === "tool_use");
assert.equal(called.stop_reason, "tool_use");
assert.deepEqual(Object.keys(call.input).sort(), ["city", "unit"]);
const again = await client.messages.stream(asked).finalMessage();
assert.deepEqual(again.content.find((block) => block.type === "tool_use").input, call.input);
const result = { type: "tool_result", tool_use_id: call.id, content: "21 degrees" };
const history = [
  ...messages,
  { role: "assistant", content: called.content },
  { role: "user", content: [result] },
];
const last = await client.messages.create({ ...common, messages: history, tools, tool_choice: { type: "none" } });
assert.ok(["end_turn", "max_tokens"].includes(last.stop_reason));

// structured output
const form = { output_config: { format: { type: "json_schema", schema } }, max_tokens: 400 };
const structured = await client.messages.create({ ...common, ...form });
assert.deepEqual(Object.keys(JSON.parse(structured.content[0].text)).sort(), ["city", "unit"]);

// errors
await assert.rejects(client.messages.create({ ...common, model: "nope" }), Anthropic.NotFoundError);
await assert.rejects(client.messages.create({ ...common, max_tokens: -1 }), Anthropic.BadRequestError);
