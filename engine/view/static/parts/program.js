// Shows the arguments of a tool call as people read them.

/**
 * Returns the code of a Python call, or else the arguments as they are.
 * @param {string} text the arguments; not always JSON, since a model wrote them
 */
export function programOf(text) {
  let parsed;
  try {
    parsed = JSON.parse(text);
  } catch {
    return text;
  }
  if (typeof parsed?.code !== "string") return JSON.stringify(parsed, null, 2);
  return parsed.input ? `${parsed.code}\n\n# input\n${parsed.input}` : parsed.code;
}
