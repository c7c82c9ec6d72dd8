// The search of the theme runs in a Worker, which browsers refuse to a page that was opened from
// disk. There a hidden frame runs the worker's script. The theme asks for a file of this name.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.body.appendChild(document.createElement("iframe"))
      frame.hidden = true
      this.inner = frame.contentWindow
      const page = this.inner.document
      page.open()
      this.inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.loaded = new Promise(resolve => this.inner.addEventListener("load", resolve))
      page.write(`<script src="${url}"></script>`)
      page.close()
    }

    postMessage(data) {
      this.loaded.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
