// openai for Node: text, streams, tools, structured output, errors.

import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "unused", maxRetries: 0 });
const messages = [{ role: "user", content: "How warm is it in Rome?" }];
const common = { model: "ryzanstein-tiny", messages, max_completion_tokens: 20, temperature: 0 };
const parameters = {
  type: "object",
  properties: { city: { type: "string", maxLength: 12 }, unit: { enum: ["C", "F"] } },
  required: ["city", "unit"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];

// text, whole and streamed
const whole = await client.chat.completions.create(common);
let text = "";
for await (const chunk of await client.chat.completions.create({ ...common, stream: true })) {
  text += chunk.choices[0].delta.content ?? "";
}
assert.equal(text, whole.choices[0].message.content);

// structured output
const format = { type: "json_schema", json_schema: { name: "weather", schema: parameters, strict: true } };
const answer = await client.chat.completions.create({ ...common, max_completion_tokens: 200, response_format: format });
assert.deepEqual(Object.keys(JSON.parse(answer.choices[0].message.content)).sort(), ["city", "unit"]);

// tools, streamed, and the way back
const asked = { ...common, tools, tool_choice: "required", max_completion_tokens: 400 };
const final = await client.chat.completions.stream(asked).finalChatCompletion();
const { message } = final.choices[0];
assert.equal(final.choices[0].finish_reason, "tool_calls");
for (const call of message.tool_calls) assert.ok(JSON.parse(call.function.arguments).unit);
const results = message.tool_calls.map(({ id }) => ({ role: "tool", tool_call_id: id, content: "21 degrees" }));
const { role, content, tool_calls } = message;
const history = [...messages, { role, content, tool_calls }, ...results];
const last = await client.chat.completions.create({ ...common, messages: history, tools, tool_choice: "none" });
assert.equal(typeof last.choices[0].message.content, "string");

// errors
await assert.rejects(client.chat.completions.create({ ...common, model: "nope" }), OpenAI.NotFoundError);
await assert.rejects(client.chat.completions.create({ ...common, temperature: -1 }), OpenAI.BadRequestError);
