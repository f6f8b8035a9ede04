// The gateway's API: addresses are relative to the page, so that a proxy may add a path before all of them.

export class ApiFailure extends Error {
  constructor(title, body) {
    super(title);
    this.body = body; // as it was sent
  }
}

const address = (path) => new URL(path, document.baseURI);

function headers(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function answered(response) {
  if (response.ok) return response;
  throw new ApiFailure(`${response.status} ${response.statusText}`.trim(), await response.text());
}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(address(path), options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiFailure("No answer", `${address(path)}: ${error.message}`);
  }
  return answered(response);
}

export async function listModels(key) {
  const response = await ask("v1/models", { headers: headers(key) });
  return (await response.json()).data;
}

// The events of a stream as they come. An error that ends it is thrown.
export async function* stream(path, body, key, signal) {
  const response = await ask(path, {
    method: "POST",
    headers: { "content-type": "application/json", ...headers(key) },
    body: JSON.stringify(body),
    signal,
  });
  let rest = "";
  const pieces = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await pieces.read();
    if (done) throw new ApiFailure("The connection was lost", "The stream ended before its last event.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue; // a comment, or the end of an event
      const data = line.slice("data: ".length);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiFailure("The stream ended with an error", data);
      yield event;
    }
  }
}

export function asCurl(path, body) {
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return `curl -N ${address(path)} \\
  -H 'Content-Type: application/json' -H "Authorization: Bearer $RYZANSTEIN_API_KEY" \\
  -d '${quoted}'`;
}
