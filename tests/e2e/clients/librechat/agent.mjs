// @librechat/agents, by which LibreChat talks to models: a run that calls a tool and reads its result, streamed.

import assert from "node:assert/strict";
import { HumanMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { GraphEvents, Providers, Run } from "@librechat/agents";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const asked = [];
const getWeather = tool(
  async ({ city }) => {
    asked.push(city);
    return "21 in the shade";
  },
  { name: "get_weather", description: "How warm it is in a city", schema: z.object({ city: z.string() }) },
);
const pieces = [];
const handle = (event, data) => {
  for (const part of data?.delta?.content ?? []) pieces.push(part.text ?? "");
};
const run = await Run.create({
  runId: "1",
  graphConfig: {
    type: "standard",
    llmConfig: {
      provider: Providers.OPENAI,
      model,
      apiKey: "unused",
      streaming: true,
      streamUsage: true,
      configuration: { baseURL: `${url}/v1` },
    },
    tools: [getWeather],
    instructions: "Be brief.",
  },
  customHandlers: { [GraphEvents.ON_MESSAGE_DELTA]: { handle } },
  returnContent: true,
});
const messages = [new HumanMessage("CALL get_weather?city=Rome")];
const options = { runId: "1", streamMode: "values", version: "v2", configurable: { thread_id: "1", user_id: "u" } };
const content = await run.processStream({ messages }, options);
assert.deepEqual(asked, ["Rome"]);
assert.ok(JSON.stringify(content).includes("21 in the shade"), JSON.stringify(content));
