// Search in pages opened from the disk, where browsers allow no workers: each worker's script runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}))
      const script = inside.document.createElement("script")
      script.src = url
      this.loaded = new Promise(resolve => script.onload = resolve)
      this.inside = inside
      inside.document.body.append(script)
    }
    async postMessage(data) {
      await this.loaded
      this.inside.dispatchEvent(new MessageEvent("message", {data}))
    }
  }
}
