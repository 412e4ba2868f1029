// Browsers start no worker from a file. Without a web server, the search of the site therefore runs in a hidden frame.
// The plugin `offline` of mkdocs-material would load a script for this from another server.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentDocument;
      // some browsers would replace an empty document after this script
      inside.open();
      inside.write("<body></body>");
      inside.close();
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.loaded = new Promise((resolve) => {
        const script = inside.createElement("script");
        script.src = url;
        script.onload = resolve;
        inside.body.append(script);
      });
    }

    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
