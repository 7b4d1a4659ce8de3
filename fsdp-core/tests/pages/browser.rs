//! Chromium without a window, told what to do over its debugging pipe: JSON messages that end with a zero byte.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// How long an answer or an event may take. A machine that does other things beside answers late.
const LIMIT: Duration = Duration::from_secs(60);

/// A browser with one page, and everything that has happened in it.
pub(crate) struct Browser {
    process: Child,
    to: ChildStdin,
    from: Receiver<Value>,
    session: Option<String>,
    next_id: u64,
    events: Vec<Value>,
    _profile: tempfile::TempDir,
}

impl Browser {
    /// Starts the browser that `CHROMIUM` names, else `chromium`.
    pub(crate) fn start() -> Self {
        let profile = tempfile::tempdir().unwrap();
        let name = std::env::var("CHROMIUM").unwrap_or_else(|_| "chromium".to_owned());
        // Its pipe is files 3 and 4, which the shell makes of its own input and output.
        let mut process = Command::new("sh")
            .args(["-c", "exec \"$@\" 3<&0 4>&1 0</dev/null 1>/dev/null", "sh", &name])
            .args(["--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
            .args(["--no-first-run", "--disable-background-networking", "--disable-extensions", "--hide-scrollbars"])
            .arg("--host-resolver-rules=MAP * ~NOTFOUND")
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .arg("about:blank")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let (to, out) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        let (sender, from) = mpsc::channel();
        std::thread::spawn(move || {
            for message in BufReader::new(out).split(0).map_while(Result::ok) {
                let Ok(message) = serde_json::from_slice(&message) else { break };
                if sender.send(message).is_err() {
                    break;
                }
            }
        });
        let events = Vec::new();
        let mut browser = Self { process, to, from, session: None, next_id: 0, events, _profile: profile };
        let target = browser.call("Target.createTarget", &json!({ "url": "about:blank" }))["targetId"].clone();
        let attached = browser.call("Target.attachToTarget", &json!({ "targetId": target, "flatten": true }));
        browser.session = Some(attached["sessionId"].as_str().unwrap().to_owned());
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.call(&format!("{domain}.enable"), &json!({}));
        }
        browser
    }

    /// Calls a method of the debugging protocol, and returns its result.
    pub(crate) fn call(&mut self, method: &str, params: &Value) -> Value {
        self.next_id += 1;
        let mut message = json!({ "id": self.next_id, "method": method, "params": params });
        if let Some(session) = &self.session {
            message["sessionId"] = session.as_str().into();
        }
        let mut bytes = message.to_string().into_bytes();
        bytes.push(0);
        self.to.write_all(&bytes).unwrap_or_else(|error| panic!("the browser does not run: {error}"));
        let id = self.next_id;
        let answer = self.wait(method, |message| message["id"] == id);
        assert!(answer.get("error").is_none(), "{method} {params}: {}", answer["error"]);
        answer["result"].clone()
    }

    /// The next message that is the one; all others are events.
    fn wait(&mut self, what: &str, is_it: impl Fn(&Value) -> bool) -> Value {
        let end = Instant::now() + LIMIT;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let message = self.from.recv_timeout(left).unwrap_or_else(|error| {
                panic!("the browser has not answered to {what} in {} s: {error}", LIMIT.as_secs())
            });
            if is_it(&message) {
                return message;
            }
            self.events.push(message);
        }
    }

    /// Opens a page and waits until it is loaded and drawn.
    pub(crate) fn open(&mut self, url: &str) {
        self.events.clear();
        self.call("Page.navigate", &json!({ "url": url }));
        let is_loaded = |message: &Value| message["method"] == "Page.loadEventFired";
        if !self.events.iter().any(is_loaded) {
            let event = self.wait(&format!("opening {url}"), is_loaded);
            self.events.push(event);
        }
        self.until("Array.from(document.querySelectorAll('.fsdp')).every((widget) => widget.dataset.drawn)");
    }

    /// Evaluates an expression of JavaScript, whose value is JSON.
    pub(crate) fn evaluate(&mut self, expression: &str) -> Value {
        let params = json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let result = self.call("Runtime.evaluate", &params);
        assert!(result.get("exceptionDetails").is_none(), "{expression}: {}", result["exceptionDetails"]);
        result["result"]["value"].clone()
    }

    /// Waits until an expression is true.
    pub(crate) fn until(&mut self, expression: &str) {
        let end = Instant::now() + LIMIT;
        while self.evaluate(expression) != true {
            assert!(Instant::now() < end, "not true after {} s: {expression}", LIMIT.as_secs());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The page's size in pixels, as on a phone below 600.
    pub(crate) fn resize(&mut self, width: u32) {
        let params = json!({ "width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600 });
        self.call("Emulation.setDeviceMetricsOverride", &params);
    }

    /// What the system prefers, and whether the page is printed.
    pub(crate) fn emulate(&mut self, scheme: &str, media: &str) {
        let features = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        self.call("Emulation.setEmulatedMedia", &json!({ "media": media, "features": features }));
    }

    /// Presses a key and lets it go.
    pub(crate) fn press(&mut self, key: &str) {
        let (code, number, text) = match key {
            "Tab" => ("Tab", 9, ""),
            "Enter" => ("Enter", 13, "\r"),
            "Space" => ("Space", 32, " "),
            "ArrowLeft" => (key, 37, ""),
            "ArrowUp" => (key, 38, ""),
            "ArrowRight" => (key, 39, ""),
            "ArrowDown" => (key, 40, ""),
            other => panic!("no code for the key {other}"),
        };
        let name = if key == "Space" { " " } else { key };
        for kind in ["keyDown", "keyUp"] {
            let mut event = json!({ "type": kind, "key": name, "code": code, "windowsVirtualKeyCode": number });
            if kind == "keyDown" && !text.is_empty() {
                event["text"] = text.into();
            }
            self.call("Input.dispatchKeyEvent", &event);
        }
    }

    /// What the page has complained about, and whatever it has asked for that is no file, since it was opened.
    pub(crate) fn complaints(&self) -> Vec<String> {
        let told = |event: &Value| {
            let params = &event["params"];
            match event["method"].as_str()? {
                "Runtime.exceptionThrown" => Some(params["exceptionDetails"].to_string()),
                "Runtime.consoleAPICalled" => Some(params["args"].to_string()),
                "Log.entryAdded" => Some(params["entry"].to_string()),
                "Network.requestWillBeSent" => {
                    let url = params["request"]["url"].as_str()?;
                    let is_local = url.starts_with("file:") || url.starts_with("data:");
                    (!is_local).then(|| format!("a request of {url}"))
                }
                _ => None,
            }
        };
        self.events.iter().filter_map(told).collect()
    }
}

/// Ends the browser, so that none is left when a test has failed.
impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
