// From the fields of the page to the body of a request.

const field = (id) => document.getElementById(id);

export class WrongField extends Error {
  constructor(id, message) {
    super(message);
    this.id = id;
  }
}

function json(id, fits, expected) {
  const text = field(id).value.trim();
  if (!text) return undefined;
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new WrongField(id, error.message);
  }
  if (!fits(value)) throw new WrongField(id, expected);
  return value;
}

function number(id) {
  const { value, validity } = field(id);
  if (validity.badInput) throw new WrongField(id, "This is no number.");
  return value === "" ? undefined : Number(value);
}

// A function may stand there alone, as OpenAI's newer API has it.
function toolList() {
  const given = json("tools", Array.isArray, "This must be a list: [...]");
  if (!given?.length) return {};
  const tools = given.map((tool) => {
    if (tool?.function || typeof tool?.name !== "string") return tool;
    const { type, ...definition } = tool;
    return { type: "function", function: definition };
  });
  return { tools, tool_choice: field("tool_choice").value };
}

function schemaFormat() {
  const isSchema = (value) => typeof value === "boolean" || (typeof value === "object" && !Array.isArray(value));
  const schema = json("schema", isSchema, "This must be a schema: {...}");
  if (schema === undefined) return {};
  return { response_format: { type: "json_schema", json_schema: { name: "answer", schema, strict: true } } };
}

function shared() {
  return {
    model: field("model").value || undefined,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true, include_workers: true },
    temperature: number("temperature"),
    top_p: number("top_p"),
    seed: number("seed"),
    stop: field("stop").value || undefined,
    ...schemaFormat(),
  };
}

// The request for the next message. Throws WrongField.
export function chatRequest(messages) {
  const system = field("system").value.trim();
  return {
    ...shared(),
    max_completion_tokens: number("max_tokens"),
    reasoning_effort: field("reasoning_effort").value || undefined,
    ...toolList(),
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
  };
}

// The request that continues a text. Throws WrongField.
export function completionRequest(prompt) {
  return { ...shared(), max_tokens: number("max_tokens"), prompt };
}

export const wantsJson = () => field("schema").value.trim() !== "";

export const EXAMPLE_TOOLS = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather in a city",
      parameters: {
        type: "object",
        properties: {
          city: { type: "string", maxLength: 24 },
          unit: { enum: ["celsius", "fahrenheit"] },
        },
        required: ["city", "unit"],
        additionalProperties: false,
      },
    },
  },
];

export const EXAMPLE_SCHEMA = {
  type: "object",
  properties: {
    name: { type: "string", maxLength: 24 },
    tags: { type: "array", items: { type: "string", maxLength: 12 }, maxItems: 3 },
    score: { type: "integer", minimum: 0, maximum: 100 },
  },
  required: ["name", "tags", "score"],
  additionalProperties: false,
};
