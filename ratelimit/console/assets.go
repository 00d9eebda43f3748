package console

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"html/template"
	"net/http"
	"time"
)

//go:embed assets/console.css assets/console.js assets/uPlot.iife.min.js assets/uPlot.min.css assets/uPlot.LICENSE
var assets embed.FS

//go:embed templates/*.html
var templateFiles embed.FS

// templates are the pages by name. They are never changed.
var templates = func() map[string]*template.Template {
	pages := make(map[string]*template.Template)
	for _, name := range []string{"limits", "limit", "key", "error"} {
		pages[name] = template.Must(template.New(name).Funcs(functions).ParseFS(templateFiles, "templates/layout.html", "templates/parts.html", "templates/"+name+".html"))
	}
	return pages
}()

// assetURL is the relative address of an asset. It has a part of the content's hash, so that a browser may keep it.
func assetURL(name string) (string, error) {
	content, err := assets.ReadFile("assets/" + name)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(content)
	return "assets/" + name + "?" + hex.EncodeToString(sum[:6]), nil
}

func (c *visit) asset(name string) error {
	content, err := assets.ReadFile("assets/" + name)
	if err != nil {
		return notFound()
	}
	if url, _ := assetURL(name); "assets/"+name+"?"+c.r.URL.RawQuery == url {
		c.w.Header().Set("Cache-Control", "private, max-age=31536000, immutable")
	}
	http.ServeContent(c.w, c.r, name, time.Time{}, bytes.NewReader(content))
	return nil
}
