// The AI SDK over each of its providers: a tool, a stream and an object. Arguments: the folder of its packages, the prompt.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [packages, prompt] = process.argv.slice(2);
const { resolve } = createRequire(`${packages}/`);
const load = (name) => import(pathToFileURL(resolve(name)));
const { generateObject, generateText, isStepCount, streamText, tool } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createAnthropic } = await load("@ai-sdk/anthropic");
const { z } = await load("zod");

const { OPENAI_BASE_URL: baseURL, OPENAI_API_KEY: apiKey, OPENAI_MODEL: name, ANTHROPIC_BASE_URL } = process.env;
const models = {
  chat: createOpenAICompatible({ name: "rocstar", baseURL, apiKey })(name),
  responses: createOpenAI({ baseURL, apiKey })(name),
  anthropic: createAnthropic({ baseURL: `${ANTHROPIC_BASE_URL}/v1`, apiKey })(name),
};
const read = tool({
  description: "Reads a file.",
  inputSchema: z.object({ path: z.string() }),
  execute: ({ path }) => readFileSync(path, "utf8"),
});

const answers = {};
for (const [provider, model] of Object.entries(models)) {
  const request = { model, prompt: `${provider}: ${prompt}`, tools: { read }, stopWhen: isStepCount(5) };
  const { text } = await generateText(request);
  let streamed = "";
  for await (const piece of streamText(request).textStream) streamed += piece;
  const schema = z.object({ number: z.number() });
  const { object } = await generateObject({ model, prompt: `${provider}, as JSON`, schema });
  answers[provider] = [text, streamed, object];
}
console.log(JSON.stringify(answers));
