//! Reads error enums out of their source, so that the page lists every variant, also one that nobody wrote an example for.

/// A variant of an error enum.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Variant {
    pub(super) name: String,
    /// Its documentation.
    pub(super) meaning: String,
    /// Its message, with the fields' names in angle brackets; `None` where the variant only passes on another error.
    pub(super) message: Option<String>,
}

/// The variants of `pub enum name` in `source`, which is formatted by rustfmt.
pub(super) fn variants(source: &str, name: &str) -> Vec<Variant> {
    let head = format!("pub enum {name} {{");
    let body = source.lines().skip_while(|line| *line != head).skip(1).take_while(|line| *line != "}");
    let (mut found, mut meaning, mut attribute) = (Vec::new(), Vec::new(), String::new());
    let mut in_attribute = false;
    for line in body {
        let Some(text) = line.strip_prefix("    ") else { continue };
        if let Some(text) = text.strip_prefix("/// ") {
            meaning.push(text);
        } else if in_attribute || text.starts_with("#[error(") {
            attribute += text;
            attribute.push('\n');
            in_attribute = !text.ends_with(")]");
        } else if text.starts_with(|c: char| c.is_ascii_uppercase()) {
            let name = text.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default().to_owned();
            let message = (!attribute.contains("error(transparent)")).then(|| template(&attribute));
            found.push(Variant { name, meaning: meaning.join(" "), message });
            meaning.clear();
            attribute.clear();
        }
    }
    assert!(!found.is_empty(), "`{head}` is not found any more");
    found
}

/// The text of `#[error("...", arguments)]`, with what is filled in named.
fn template(attribute: &str) -> String {
    let Some((text, rest)) = literal(attribute) else { return String::new() };
    let mut arguments = arguments(rest.trim_start_matches(',').trim().trim_end_matches(")]")).into_iter();
    let mut shown = String::new();
    let mut left = text.as_str();
    while let Some(at) = left.find(['{', '}']) {
        shown += &left[..at];
        if left[at..].starts_with("{{") || left[at..].starts_with("}}") {
            shown += &left[at..=at];
            left = &left[at + 2..];
            continue;
        }
        let len = left[at..].find('}').unwrap();
        let name = left[at + 1..at + len].split(':').next().unwrap_or_default().to_owned();
        let name = if name.is_empty() { arguments.next().unwrap_or("...".to_owned()) } else { name };
        shown += &format!("<{name}>");
        left = &left[at + len + 1..];
    }
    shown + left
}

/// What the arguments of a message are called: `path.display()` is `path`, `human_bytes(*free_bytes)` is `free_bytes`.
fn arguments(text: &str) -> Vec<String> {
    let mut depth = 0;
    let split = |c: char| {
        depth += i32::from("([{".contains(c)) - i32::from(")]}".contains(c));
        c == ',' && depth == 0
    };
    let name = |argument: &str| {
        let argument = argument.trim();
        let is_call = argument.find('(').is_some_and(|open| !argument[..open].contains('.'));
        let from = if is_call { argument.split_once('(').map_or(argument, |(_, inner)| inner) } else { argument };
        let from = from.trim_start_matches(|c: char| !c.is_alphabetic());
        from.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default().to_owned()
    };
    text.split(split).filter(|argument| !argument.trim().is_empty()).map(name).collect()
}

/// The first string literal in `text` as a program sees it, and what follows it.
pub(super) fn literal(text: &str) -> Option<(String, &str)> {
    let start = text.find('"')? + 1;
    let mut value = String::new();
    let mut chars = text[start..].char_indices().peekable();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((value, &text[start + at + 1..])),
            '\\' => match chars.next()?.1 {
                '\n' => while chars.next_if(|(_, c)| c.is_whitespace()).is_some() {},
                'n' => value.push('\n'),
                escaped => value.push(escaped),
            },
            c => value.push(c),
        }
    }
    None
}

/// Problems and remedies that `source` writes at `Error::Misuse { .. }`, `Error::Parameter { .. }` and `misuse(..)`.
pub(super) fn remedies(source: &str) -> Vec<[String; 2]> {
    let source = source.split("#[cfg(test)]").next().unwrap_or_default();
    let marks = ["Error::Misuse {", "Error::Parameter {", ".misuse("];
    let mut starts: Vec<_> = marks.iter().flat_map(|mark| source.match_indices(mark)).map(|(at, _)| at).collect();
    starts.sort_unstable();
    let pair = |at: usize| {
        let text = &source[at..];
        let (problem, rest) = literal(text)?;
        let before = &text[..text.len() - rest.len()];
        let (remedy, _) = literal(rest)?;
        // What is put together elsewhere, and what is our own mistake, has no text here.
        let is_here = !before.contains("problem,") && !before.contains(';') && !remedy.contains("report this");
        let named = problem.replace(":?}", "}").replace("{}", "{...}").replace('{', "‹").replace('}', "›");
        is_here.then_some([named, remedy])
    };
    starts.into_iter().filter_map(pair).collect()
}

#[test]
fn messages_are_read_as_a_program_prints_them() {
    let source = "\
pub enum Wrong {
    /// A file
    /// is not there.
    #[error(
        \"{}: {bytes:?} of {{ all }} \\
         are {}\",
        path.display(), human_bytes(*free_bytes)
    )]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// Another one.
    #[error(transparent)]
    Other(Box<Other>),
}
";
    let found = variants(source, "Wrong");
    let missing = Variant {
        name: "Missing".into(),
        meaning: "A file is not there.".into(),
        message: Some("<path>: <bytes> of { all } are <free_bytes>".into()),
    };
    assert_eq!(found[0], missing);
    assert_eq!((found[1].name.as_str(), &found[1].message), ("Other", &None));
    let source = "Err(Error::Misuse { problem: format!(\"{} is {x:?}\", y), remedy: \"leave it\" })";
    assert_eq!(remedies(source), [["‹...› is ‹x›".to_owned(), "leave it".to_owned()]]);
}
