// Search of a site that is opened from files: a browser starts no worker there, so the script of
// the worker runs in a hidden frame. Served over HTTP, the pages use a worker.
"use strict"
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = inside.document.createElement("script")
          script.src = source
          script.onload = resolve
          script.onerror = () => reject(new Error(`cannot load ${source}`))
          inside.document.head.append(script)
        })
      inside.importScripts = (...sources) =>
        sources.reduce((loaded, each) => loaded.then(() => load(each)), Promise.resolve())
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      this.loaded = load(url)
    }

    postMessage(data) {
      const inside = this.frame.contentWindow
      this.loaded.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
  window.Worker = window.IFrameWorker
}
