// Vercel's ai: text, streams, a tool with its way back, structured output, errors.

import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateText, jsonSchema, streamText, tool } from "ai";

const provider = createOpenAICompatible({
  name: "ryzanstein",
  baseURL: `${process.argv[2]}/v1`,
  apiKey: "unused",
  supportsStructuredOutputs: true,
});
const common = { model: provider("ryzanstein-tiny"), prompt: "How warm is it in Rome?", temperature: 0, maxRetries: 0 };
const schema = jsonSchema({
  type: "object",
  properties: { city: { type: "string", maxLength: 12 }, unit: { enum: ["C", "F"] } },
  required: ["city", "unit"],
  additionalProperties: false,
});

// text, whole and streamed
const whole = await generateText({ ...common, maxOutputTokens: 20 });
assert.equal(await streamText({ ...common, maxOutputTokens: 20 }).text, whole.text);

// structured output
const answer = await generateText({ ...common, maxOutputTokens: 300, output: Output.object({ schema }) });
assert.deepEqual(Object.keys(answer.output).sort(), ["city", "unit"]);

// a tool that runs here; its result goes back
const asked = [];
const execute = async ({ city }) => {
  asked.push(city);
  return "21 degrees";
};
const called = await generateText({
  ...common,
  maxOutputTokens: 300,
  tools: { getWeather: tool({ description: "How warm it is in a city", inputSchema: schema, execute }) },
  toolChoice: { type: "tool", toolName: "getWeather" },
  stopWhen: ({ steps }) => steps.length === 2,
  prepareStep: ({ stepNumber }) => (stepNumber ? { toolChoice: "none" } : {}),
});
assert.equal(asked.length, 1);
assert.equal(called.steps[0].toolCalls[0].toolName, "getWeather");
assert.equal(called.steps.length, 2);
assert.equal(typeof called.text, "string");

// errors
await assert.rejects(
  generateText({ ...common, model: provider("nope") }),
  (error) => APICallError.isInstance(error) && error.statusCode === 404 && error.message.includes("nope"),
);
