// Texts as they are shown: names, keys and responses are chosen by others.

// Characters that control a terminal, or that hide or reorder others. Line breaks and tabs stay.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]/gu;

// Escaped as the commands do it: \u202e.
export const visible = (text) => String(text).replace(HIDDEN,
  (found) => `\\u${found.charCodeAt(0).toString(16).padStart(4, "0")}`);
