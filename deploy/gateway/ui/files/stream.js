// Server-sent events over fetch, since EventSource cannot send the key as a header. It knows
// nothing of what the events say.

const KEY = "prfaas-operator-key";
const SILENCE_MS = 25000;
const RETRY_MS = 1000;

export function keptKey() {
  return sessionStorage.getItem(KEY) || "";
}

export function keepKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** Follows /ui/events until it is stopped. `on` has event(name, value), state(words) and
 * refused(status): the key is missing or wrong, and following has ended. Returns the stop. */
export function follow(on) {
  let isStopped = false;
  let current = null;

  async function once() {
    const control = (current = new AbortController());
    let alarm = setTimeout(() => control.abort(), SILENCE_MS);
    const key = keptKey();
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    try {
      const answer = await fetch("/ui/events", { headers, cache: "no-store", signal: control.signal });
      if (answer.status === 401 || answer.status === 403) {
        isStopped = true;
        on.refused(answer.status);
        return;
      }
      if (!answer.ok) throw new Error(`the gateway answered ${answer.status}`);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        clearTimeout(alarm);
        alarm = setTimeout(() => control.abort(), SILENCE_MS);
        const blocks = (text + value).split("\n\n");
        text = blocks.pop();
        for (const block of blocks) take(block);
      }
    } finally {
      clearTimeout(alarm);
      control.abort();
    }
  }

  function take(block) {
    let name = "", data = "";
    for (const line of block.split("\n")) {
      if (line.startsWith("event: ")) name = line.slice(7);
      if (line.startsWith("data: ")) data = line.slice(6);
    }
    if (name === "refused") {
      isStopped = true;
      on.refused(401);
    } else if (name && !isStopped) {
      on.event(name, JSON.parse(data));
    }
  }

  (async () => {
    while (!isStopped) {
      try {
        await once();
      } catch {
        // Said below: whatever the reason, the page tries again.
      }
      if (isStopped) return;
      on.state("not connected, trying again");
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  })();
  return () => {
    isStopped = true;
    current?.abort();
  };
}
