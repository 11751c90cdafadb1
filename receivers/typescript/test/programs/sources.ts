/** The JSON functions of the package, which are not public: programs need exact integers, too. */

export interface Json {
  arraySources(text: string): string[] | null;
  memberOf(source: string): unknown;
  objectSources(text: string): Map<string, string> | null;
  requireValidJson(text: string): void;
}

const path = new URL("../../dist/json.js", import.meta.url).href;
export const { arraySources, memberOf, objectSources, requireValidJson } = (await import(path)) as Json;
