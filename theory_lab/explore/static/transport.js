// How the page asks for pictures: over HTTP, or through a notebook's widget channel. Both give the same function
// ask(kind, parameters) -> {header, data}; errors are Error objects with one readable line.

export function httpTransport(base) {
  return async function ask(kind, parameters = {}) {
    let response;
    try {
      response = await fetch(new URL(`${kind}?${new URLSearchParams(parameters)}`, base), { cache: "no-store" });
    } catch {
      throw new Error("the explorer's server does not answer: is it still running?");
    }
    const bytes = await response.arrayBuffer();
    if (!response.ok) {
      let line = `the server answers ${response.status}`;
      try {
        line = JSON.parse(new TextDecoder().decode(bytes)).error ?? line;
      } catch {
        // No JSON: the status is all there is to say.
      }
      throw new Error(line);
    }
    const size = new DataView(bytes).getUint32(0, true);
    const header = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, size)));
    return { header, data: new Float32Array(bytes.slice(4 + size)) };
  };
}

export function widgetTransport(model) {
  let last = 0;
  const waiting = new Map();
  model.on("msg:custom", (message, buffers) => {
    const done = waiting.get(message.id);
    if (!done) return;
    waiting.delete(message.id);
    if (message.error) return done.reject(new Error(message.error));
    const view = buffers?.[0];
    const data = view ? new Float32Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength)) : null;
    done.resolve({ header: message.header, data: data ?? new Float32Array() });
  });
  return function ask(kind, parameters = {}) {
    const id = `${(last += 1)}-${Math.random().toString(36).slice(2)}`;
    const words = Object.fromEntries(Object.entries(parameters).map(([name, value]) => [name, String(value)]));
    return new Promise((resolve, reject) => {
      waiting.set(id, { resolve, reject });
      model.send({ id, kind, parameters: words });
    });
  };
}

// Runs tasks one at a time, pictures before thumbnails, the newest request of a name instead of older ones.
export class Queue {
  constructor() {
    this.tasks = new Map();
    this.busy = false;
  }

  // The task is async and gets nothing; a task of the same name that has not begun is dropped.
  put(name, urgency, task) {
    this.tasks.delete(name);
    this.tasks.set(name, { urgency, task });
    this.pump();
  }

  drop(prefix) {
    for (const name of [...this.tasks.keys()]) if (name.startsWith(prefix)) this.tasks.delete(name);
  }

  async pump() {
    if (this.busy) return;
    this.busy = true;
    while (this.tasks.size) {
      const [name, next] = [...this.tasks].reduce((best, one) => (one[1].urgency < best[1].urgency ? one : best));
      this.tasks.delete(name);
      try {
        await next.task();
      } catch (error) {
        console.error(error);
      }
    }
    this.busy = false;
  }
}
