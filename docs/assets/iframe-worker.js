/* A page that is opened as a file may start no worker, so the search runs in a hidden frame. */
"use strict"
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.head.parentNode.appendChild(frame)
      const inside = frame.contentWindow
      inside.postMessage = data => setTimeout(() => this.answered(data))
      inside.importScripts = (...urls) => urls.reduce(
        (done, one) => done.then(() => new Promise(loaded => {
          const script = inside.document.createElement("script")
          script.src = one
          script.onload = script.onerror = loaded
          inside.document.head.appendChild(script)
        })), Promise.resolve())
      this.frame = inside
      this.ready = inside.importScripts(url)
    }
    answered(data) {
      const event = new MessageEvent("message", { data })
      this.dispatchEvent(event)
      if (this.onmessage) this.onmessage(event)
    }
    postMessage(data) {
      this.ready.then(() => this.frame.dispatchEvent(new this.frame.MessageEvent("message", { data })))
    }
    terminate() {}
  }
